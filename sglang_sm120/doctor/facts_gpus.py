"""What NVIDIA's driver says about its GPUs, from the texts of nvidia-smi. Fields that are missing stay None."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from sglang_sm120.doctor.machine import Machine

_RESTING = ("P8", "P12")  # states of lowest clocks


@dataclass(frozen=True)
class Process:
    """One user of a GPU. kind: "C" for compute. parent: its parent's id, 1 for one that was left over; 0: not known."""

    pid: int
    kind: str
    name: str
    used_mib: int
    parent: int = 0


@dataclass(frozen=True)
class Gpu:
    """One GPU as `nvidia-smi -q -x` has it. Sizes in MiB, power in W.

    Attributes:
        bus_id: as in /sys, "0000:01:00.0".
        capability: (major, minor); None where the driver is too old to say it.
        link_gen, link_lanes: as they are now; at rest a GPU lowers its generation.
        slot_gen: the most that the slot can do; card_gen: the card.
        slowed: what lowers the clocks now and should not: "hw_thermal_slowdown" and so on.
    """

    index: int
    name: str
    bus_id: str
    capability: tuple[int, int] | None = None
    performance_state: str = ""
    busy: bool = False
    link_gen: int | None = None
    card_gen: int | None = None
    slot_gen: int | None = None
    link_lanes: int | None = None
    max_link_lanes: int | None = None
    memory_mib: int | None = None
    used_mib: int | None = None
    bar1_mib: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    persistence: str = ""
    compute_mode: str = ""
    mig: str = ""
    ecc: str = ""
    ecc_pending: str = ""
    uncorrected_errors: int = 0
    row_remapping_failed: bool = False
    slowed: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()

    @property
    def is_sm120(self) -> bool:
        """Capability 12.x; where it is not known, by the names of cards that have it."""
        if self.capability is not None:
            return self.capability[0] == 12
        return bool(re.search(r"RTX PRO \d000 Blackwell|RTX 50\d0|GB10", self.name))

    @property
    def at_rest(self) -> bool:
        return self.performance_state in _RESTING or (bool(self.performance_state) and not self.busy)


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver. state: that of the command; detail: what it said where it failed.

    links: between the GPUs by `nvidia-smi topo -m`; p2p: by `topo -p2p r`: (0, 1) -> "PIX", "OK". Empty: not known.
    """

    state: str
    detail: str = ""
    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[int, int, str], ...] = ()
    p2p: tuple[tuple[int, int, str], ...] = ()


def read_driver(machine: Machine) -> Driver:
    """What the driver says; every command may be missing, fail or hang."""
    output = machine.run("nvidia-smi-q")
    if not output.ok:
        return Driver(output.state, " ".join(output.text.split())[:300])
    try:
        # What precedes the document (a warning of an older tool) is not XML; neither are control characters in names.
        start = output.text.find("<nvidia_smi_log")
        root = ElementTree.fromstring(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", output.text[max(start, 0) :]))
    except ElementTree.ParseError as error:
        return Driver("failed", f"its XML cannot be read ({error})")
    capabilities = _capabilities(machine.run("nvidia-smi-capability").text)
    elements = root.findall("gpu")
    several = len(elements) > 1
    return Driver(
        state="ok",
        version=_text(root, "driver_version"),
        cuda=_text(root, "cuda_version"),
        gpus=tuple(_gpu(machine, index, element, capabilities) for index, element in enumerate(elements)),
        links=_matrix(machine.run("nvidia-smi-topo").text) if several else (),
        p2p=_matrix(machine.run("nvidia-smi-p2p").text) if several else (),
    )


def bus_id(text: str) -> str:
    """nvidia-smi's "00000000:C1:00.0" as /sys writes it."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _gpu(machine: Machine, index: int, element: ElementTree.Element, capabilities: dict[str, tuple[int, int]]) -> Gpu:
    place = bus_id(_text(element, "pci/pci_bus_id") or element.get("id", ""))
    generation, widths = "pci/pci_gpu_link_info/pcie_gen/", "pci/pci_gpu_link_info/link_widths/"
    # A driver from 2023 on has two tables of power; older ones have one under another name.
    power = "gpu_power_readings/" if element.find("gpu_power_readings") is not None else "power_readings/"
    utilization = _number(_text(element, "utilization/gpu_util"))
    errors = [_number(node.text or "") or 0 for node in element.iterfind("ecc_errors/volatile/*")
              if "uncorrectable" in node.tag]  # fmt: skip
    return Gpu(
        index=index,
        name=_text(element, "product_name"),
        bus_id=place,
        capability=capabilities.get(place),
        performance_state=_text(element, "performance_state"),
        busy=bool(utilization),
        link_gen=_number(_text(element, generation + "current_link_gen")),
        card_gen=_number(_text(element, generation + "max_device_link_gen")),
        slot_gen=_number(_text(element, generation + "max_host_link_gen")),
        link_lanes=_number(_text(element, widths + "current_link_width")),
        max_link_lanes=_number(_text(element, widths + "max_link_width")),
        memory_mib=_number(_text(element, "fb_memory_usage/total")),
        used_mib=_number(_text(element, "fb_memory_usage/used")),
        bar1_mib=_number(_text(element, "bar1_memory_usage/total")),
        power_limit_w=_watts(_text(element, power + "current_power_limit") or _text(element, power + "power_limit")),
        default_power_limit_w=_watts(_text(element, power + "default_power_limit")),
        persistence=_text(element, "persistence_mode"),
        compute_mode=_text(element, "compute_mode"),
        mig=_text(element, "mig_mode/current_mig"),
        ecc=_text(element, "ecc_mode/current_ecc"),
        ecc_pending=_text(element, "ecc_mode/pending_ecc"),
        uncorrected_errors=sum(errors),
        row_remapping_failed=_text(element, "remapped_rows/remapped_row_failure") == "Yes",
        slowed=tuple(_slowed(element)),
        processes=tuple(_process(machine, node) for node in element.iterfind("processes/process_info")),
    )


def _slowed(element: ElementTree.Element) -> list[str]:
    """A power cap and rest are ordinary; these are not."""
    bad = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
    found = []
    for table in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for node in element.iterfind(f"{table}/*"):
            name = re.sub(r"^clocks_(event|throttle)_reason_", "", node.tag)
            if name in bad and (node.text or "").strip() == "Active":
                found.append(name)
    return found


def _process(machine: Machine, node: ElementTree.Element) -> Process:
    pid = _number(_text(node, "pid")) or 0
    parent = re.search(r"^PPid:\s*(\d+)", machine.text(f"/proc/{pid}/status"), re.MULTILINE) if pid else None
    name = (_text(node, "process_name").split() or [""])[0]  # its arguments may be private
    return Process(
        pid=pid,
        kind=_text(node, "type"),
        name=name.rpartition("/")[2] if name.startswith("/") else name,
        used_mib=_number(_text(node, "used_memory")) or 0,
        parent=int(parent[1]) if parent else 0,
    )


def _capabilities(text: str) -> dict[str, tuple[int, int]]:
    """From lines such as "00000000:01:00.0, 12.0"."""
    found = {}
    for line in text.splitlines():
        place, _, number = line.partition(",")
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", number)
        if match:
            found[bus_id(place)] = (int(match[1]), int(match[2]))
    return found


def _matrix(text: str) -> tuple[tuple[int, int, str], ...]:
    """The cells between GPUs of a `nvidia-smi topo` table, each pair once.

    Columns are separated by tabs. Terminals get an underlined header; a pipe may get those codes too.
    """
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next((line for line in lines if re.match(r"\s*GPU0\b", line)), "")
    columns = [column.strip() for column in header.split("\t")]
    cells = []
    for line in lines:
        row = [cell.strip() for cell in line.split("\t")]
        match = re.fullmatch(r"GPU(\d+)", row[0])
        if line == header or match is None:
            continue
        for column, cell in zip(columns, row, strict=False):
            other = re.fullmatch(r"GPU(\d+)", column)
            if other and int(other[1]) > int(match[1]) and cell:
                cells.append((int(match[1]), int(other[1]), cell))
    return tuple(cells)


def _text(element: ElementTree.Element, path: str) -> str:
    """A field's text; empty where the driver has none."""
    text = (element.findtext(path) or "").strip()
    return "" if text in ("N/A", "[N/A]", "None", "Not Supported", "Unknown Error") else text


def _number(text: str) -> int | None:
    """The first whole number of "16x", "97887 MiB", "600.00 W"."""
    match = re.match(r"\s*(\d+)", text)
    return int(match[1]) if match else None


def _watts(text: str) -> float | None:
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*W", text)
    return float(match[1]) if match else None
