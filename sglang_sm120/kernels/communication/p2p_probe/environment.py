"""What of the machine explains a fault of P2P: IOMMU, ACS, BAR1, the driver's registry. Reads files, changes nothing.

Every fact is optional: files are missing in containers and virtual machines, and some need root.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0x1C  # request redirect, completion redirect, upstream forwarding
_EXTENDED = 0x100  # where extended capabilities start in the configuration space
_NVIDIA_PARAMETERS = ("RegistryDwords", "EnableResizableBar", "DmaRemapPeerMmio", "GrdmaPciTopoCheckOverride")
_IOMMU_ARGUMENT = re.compile(r"^(?:(?:amd_|intel_)?iommu(?:\.\w+)?|pci|pcie_acs_override)(?:=.*)?$")


@dataclass(frozen=True)
class Environment:
    """Facts; empty or None where they cannot be read.

    Attributes:
        iommu_arguments: of the kernel's command line, about IOMMU and PCI.
        iommus: that translate on this machine.
        gpu_iommu_types: "PCI bus id: type"; identity is passthrough, DMA and DMA-FQ translate.
        acs_bridges: above these GPUs, that send traffic between GPUs up to the root (reading it needs root).
        small_bar1: "PCI bus id: MiB" of GPUs that show less than 1 GiB of their memory on the bus.
        driver_parameters: "name: value" of NVIDIA's kernel module, those that concern P2P.
        force_p2p: its registry has a key that forces P2P.
        uvm_disable_hmm: of the module nvidia_uvm.
    """

    iommu_arguments: tuple[str, ...] = ()
    iommus: tuple[str, ...] = ()
    gpu_iommu_types: tuple[str, ...] = ()
    acs_bridges: tuple[str, ...] = ()
    small_bar1: tuple[str, ...] = ()
    driver_parameters: tuple[str, ...] = ()
    force_p2p: bool = False
    uvm_disable_hmm: bool | None = None

    @property
    def iommu_translates(self) -> bool | None:
        """Whether the IOMMU translates what these GPUs send; None if that is not known."""
        types = [line.rpartition(": ")[2] for line in self.gpu_iommu_types]
        return any(kind != "identity" for kind in types) if types else None

    def lines(self) -> list[str]:
        """Every fact that is known, in a line each."""
        facts = (
            ("kernel arguments", self.iommu_arguments),
            ("IOMMUs", self.iommus),
            ("IOMMU groups", self.gpu_iommu_types),
            ("bridges with ACS redirection", self.acs_bridges),
            ("small BAR1", self.small_bar1),
            ("NVIDIA driver", self.driver_parameters),
        )
        lines = [f"{name}: {', '.join(values)}" for name, values in facts if values]
        if self.uvm_disable_hmm is not None:
            lines.append(f"nvidia_uvm uvm_disable_hmm: {'Y' if self.uvm_disable_hmm else 'N'}")
        return lines


def read_environment(pci_bus_ids: Sequence[str] = (), root: Path = _ROOT) -> Environment:
    """The facts of this machine and of these GPUs. root: of the file system. Raises nothing."""
    devices = root / "sys/bus/pci/devices"
    parameters = tuple(_driver_parameters(_read(root / "proc/driver/nvidia/params")))
    hmm = _read(root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip()
    iommus: tuple[str, ...] = ()
    with contextlib.suppress(OSError):
        iommus = tuple(sorted(path.name for path in (root / "sys/class/iommu").iterdir()))
    types, bars = [], []
    for bus_id in pci_bus_ids:
        if kind := _read(devices / bus_id / "iommu_group/type").strip():
            types.append(f"{bus_id}: {kind}")
        size = _bar1_bytes(_read(devices / bus_id / "resource"))
        if size is not None and size < 1 << 30:
            bars.append(f"{bus_id}: {size >> 20} MiB")
    return Environment(
        iommu_arguments=tuple(word for word in _read(root / "proc/cmdline").split() if _IOMMU_ARGUMENT.match(word)),
        iommus=iommus,
        gpu_iommu_types=tuple(types),
        acs_bridges=tuple(dict.fromkeys(bridge for bus_id in pci_bus_ids for bridge in _acs_bridges(devices, bus_id))),
        small_bar1=tuple(bars),
        driver_parameters=parameters,
        force_p2p=any("forcep2p" in line.lower() for line in parameters),
        uvm_disable_hmm=None if not hmm else hmm in ("Y", "1"),
    )


def read_link(pci_bus_id: str, root: Path = _ROOT) -> tuple[float | None, int | None, int | None]:
    """A device's PCIe link as it is now: GB/s (1e9) in one direction, lanes, and the lanes that it could have.

    An idle GPU slows its link down: ask right after it was busy.
    """
    folder = root / "sys/bus/pci/devices" / pci_bus_id
    speed = re.match(r"([\d.]+) GT/s", _read(folder / "current_link_speed"))
    lanes, most = (_number(_read(folder / name)) for name in ("current_link_width", "max_link_width"))
    if speed is None or not lanes:
        return None, lanes, most
    gt_s = float(speed[1])
    return gt_s * lanes / 8 * (0.8 if gt_s < 8 else 128 / 130), lanes, most


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _driver_parameters(text: str) -> Iterator[str]:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        value = value.strip().strip('"')
        if name.strip() in _NVIDIA_PARAMETERS and value:
            yield f"{name.strip()}: {value}"


def _bar1_bytes(resource: str) -> int | None:
    """The file has a line a resource: first address, last address, flags."""
    lines = resource.splitlines()
    try:
        first, last = (int(word, 16) for word in lines[1].split()[:2])
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def _acs_bridges(devices: Path, bus_id: str) -> Iterator[str]:
    """The bridges above a device, nearest first, whose ACS redirects."""
    try:
        place = (devices / bus_id).resolve(strict=True)
    except OSError:
        return
    for bridge in place.parents:
        if not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bridge.name):
            return
        with contextlib.suppress(OSError):
            if _acs_control((bridge / "config").read_bytes()) & _ACS_REDIRECT:
                yield bridge.name


def _acs_control(config: bytes) -> int:
    """The ACS control register of a configuration space; 0 without one, or where root alone may read that far."""
    at, seen = _EXTENDED, set()
    while at >= _EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return 0
