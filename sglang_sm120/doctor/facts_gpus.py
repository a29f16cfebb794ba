"""What NVIDIA's driver says about its GPUs, from the texts of nvidia-smi. Fields that are missing stay None."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from sglang_sm120.doctor import facts_smi
from sglang_sm120.doctor.facts_smi import bus_id, field, number, watts
from sglang_sm120.doctor.machine import Machine, Output

_PARENTS = 64
"""Of so many processes of a GPU the parent is looked up: each is a file in /proc, and there may be thousands."""

# Cards of compute capability 12.x by name, for drivers that do not say it. "RTX 5000" alone is an older card.
_SM120_NAME = re.compile(r"RTX PRO \d{3,4}\b.*\bBlackwell|GeForce RTX 50[5-9]0", re.IGNORECASE)
_SM121_NAME = re.compile(r"\bGB10\b")


@dataclass(frozen=True)
class Process:
    """One user of a GPU. kind: "C" for compute. parent: its parent's id, 1 for one that was left over; 0: not known.

    used_mib: None where the driver does not say it, as in WSL. service: of systemd, which runs it.
    """

    pid: int
    kind: str
    name: str
    used_mib: int | None
    parent: int = 0
    service: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as `nvidia-smi -q -x` has it. Sizes in MiB, power in W.

    Attributes:
        index: nvidia-smi's, among the GPUs that it reached.
        bus_id: as in /sys, "0000:01:00.0". uuid: "GPU-..."; empty where it is not known.
        capability: (major, minor); None where the driver is too old to say it.
        busy: something ran on it while it was looked at; idle: the driver says that nothing did; None: it does not say.
        link_gen, link_lanes: as they are now; without load a GPU lowers its generation.
        slot_gen: the most that the slot can do; card_gen: the card.
        mig_devices: the parts that MIG has made of it.
        license: state of a virtual GPU's licence; empty for others.
        fault: what the driver writes in place of values, such as "GPU requires reset"; empty where all is well.
        recovery: what the driver wants done, "Reset", "Reboot", "Drain P2P" or "Drain and Reset"; empty for nothing.
        row_remapping_pending: memory that failed is replaced at the next reset; repair_pending: other parts.
        errors_beyond_limit: more memory failed than can be repaired, or than the maker allows.
        slowed: what lowers the clocks now and should not: "hw_thermal_slowdown" and so on.
    """

    index: int
    name: str
    bus_id: str
    uuid: str = ""
    capability: tuple[int, int] | None = None
    performance_state: str = ""
    busy: bool = False
    idle: bool | None = None
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
    mig_devices: int = 0
    license: str = ""
    ecc: str = ""
    ecc_pending: str = ""
    fault: str = ""
    recovery: str = ""
    uncorrected_errors: int = 0
    errors_beyond_limit: bool = False
    row_remapping_pending: bool = False
    row_remapping_failed: bool = False
    repair_pending: bool = False
    slowed: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()

    @property
    def sm120_capability(self) -> tuple[int, int] | None:
        """(12, minor), or None for any other GPU; where the driver does not say it, by the names of cards."""
        if self.capability is not None:
            return self.capability if self.capability[0] == 12 else None
        if _SM121_NAME.search(self.name):
            return (12, 1)
        return (12, 0) if _SM120_NAME.search(self.name) else None

    @property
    def is_sm120(self) -> bool:
        return self.sm120_capability is not None

    @property
    def link_under_load(self) -> bool:
        """Whether `link_gen` says what the link can do: it works, in one of the states in which a card computes."""
        return self.busy and not self.idle and self.performance_state in ("P0", "P1", "P2")

    @property
    def best_gen(self) -> int | None:
        """The generation that card and slot both can do; the card's alone where the slot's is not known."""
        return min(self.card_gen, self.slot_gen or self.card_gen) if self.card_gen else None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver. state: that of the command, "ok" also where it failed half way: `gpus` are those it reached.

    Attributes:
        detail: what it said where it failed.
        lost: GPUs that it could not reach: PCI bus id, or "GPU 1", and its words.
        inforoms: PCI bus ids of cards with a damaged infoROM.
        links: between the GPUs by `nvidia-smi topo -m`; p2p: by `topo -p2p r`: 0, 1, "PIX" or "OK". Empty: not known.
    """

    state: str
    detail: str = ""
    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    inforoms: tuple[str, ...] = ()
    links: tuple[tuple[int, int, str], ...] = ()
    p2p: tuple[tuple[int, int, str], ...] = ()


def read_driver(machine: Machine) -> Driver:
    """What the driver says; every command may be missing, fail, hang, or end half way."""
    output = machine.run("nvidia-smi-q")
    if output.state in ("missing", "skipped"):
        gpus = _of_proc(machine) if output.state == "missing" else ()
        return Driver(output.state, output.why(), gpus=gpus)
    if output.state == "hung":  # those that it had not come to yet may be well
        return Driver("hung", _reached(output.text))
    listing = machine.run("nvidia-smi-capability").text
    lost = facts_smi.lost((output.text, listing))
    inforoms = facts_smi.corrupted_inforoms((output.text, listing))
    known = facts_smi.capabilities(listing)
    read = facts_smi.document(output.text)
    if read.root is None:
        gpus = tuple(
            Gpu(index, _model(machine, place) or "NVIDIA GPU", place, capability=capability)
            for index, (place, capability) in enumerate(known.items())
        )
        if lost and not gpus:  # it ended at the first of them, and the kernel module still has the others
            gpus = tuple(gpu for gpu in _of_proc(machine) if gpu.bus_id not in lost)
        state = "ok" if gpus else "failed"
        said = Output("failed", output.text, output.code).why()  # some versions say why and end with status 0
        detail = read.error if output.ok and said == "exit status 0" else said
        return Driver(state, detail, _module_version(machine), "", gpus, tuple(lost.items()), inforoms)
    every = (_gpu(machine, index, element, known) for index, element in enumerate(read.root.findall("gpu")))
    gpus = tuple(gpu for gpu in every if gpu.bus_id not in lost)  # one may be lost between two commands
    several = len(gpus) > 1
    return Driver(
        state="ok",
        detail=output.why() or ("" if read.whole else "its XML is cut off"),
        version=field(read.root, "driver_version") or field(read.root, "kmd_version"),
        cuda=field(read.root, "cuda_version") or field(read.root, "cuda_umd_version"),  # the latter from 13.x on
        gpus=gpus,
        lost=tuple(lost.items()),
        inforoms=inforoms,
        links=facts_smi.matrix(machine.run("nvidia-smi-topo").text) if several else (),
        p2p=facts_smi.matrix(machine.run("nvidia-smi-p2p").text) if several else (),
    )


def _reached(text: str) -> str:
    """Which GPU it was at when it stopped answering."""
    read = facts_smi.document(text)
    places = [bus_id(field(gpu, "pci/pci_bus_id") or gpu.get("id", "")) for gpu in read.root or () if gpu.tag == "gpu"]
    return f"it had answered for {', '.join(places)}" if places else ""


def _of_proc(machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs of the kernel module, where nvidia-smi is not installed: names and places only."""
    places = machine.names("/proc/driver/nvidia/gpus")
    return tuple(Gpu(index, model, place) for index, place in enumerate(places) if (model := _model(machine, place)))


def _model(machine: Machine, place: str) -> str:
    match = re.search(r"^Model:\s*(\S.*)$", machine.text(f"/proc/driver/nvidia/gpus/{place}/information"), re.MULTILINE)
    return match[1].strip() if match and match[1].strip() != "Unknown" else ""


def _module_version(machine: Machine) -> str:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", machine.text("/proc/driver/nvidia/version"))
    return match[1] if match else ""


def _gpu(machine: Machine, index: int, element: ElementTree.Element, known: Mapping[str, tuple[int, int]]) -> Gpu:
    place = bus_id(field(element, "pci/pci_bus_id") or element.get("id", ""))
    generation, widths = "pci/pci_gpu_link_info/pcie_gen/", "pci/pci_gpu_link_info/link_widths/"
    # A driver from 2023 on has two tables of power; older ones have one under another name.
    power = "gpu_power_readings/" if element.find("gpu_power_readings") is not None else "power_readings/"
    reasons = "clocks_event_reasons/clocks_event_reason_gpu_idle"
    idle = field(element, reasons) or field(element, reasons.replace("event", "throttle"))
    errors = [number(node.text or "") or 0 for node in element.iterfind("ecc_errors/volatile/*")
              if "uncorrectable" in node.tag]  # fmt: skip
    return Gpu(
        index=index,
        name=field(element, "product_name"),
        bus_id=place,
        uuid=_uuid(element),
        capability=known.get(place),
        performance_state=field(element, "performance_state"),
        busy=bool(number(field(element, "utilization/gpu_util"))),
        idle=idle == "Active" if idle else None,
        link_gen=number(field(element, generation + "current_link_gen")),
        card_gen=number(
            field(element, generation + "max_device_link_gen") or field(element, generation + "max_link_gen")
        ),
        slot_gen=number(field(element, generation + "max_host_link_gen")),
        link_lanes=number(field(element, widths + "current_link_width")),
        max_link_lanes=number(field(element, widths + "max_link_width")),
        memory_mib=number(field(element, "fb_memory_usage/total")),
        used_mib=number(field(element, "fb_memory_usage/used")),
        bar1_mib=number(field(element, "bar1_memory_usage/total")),
        power_limit_w=watts(field(element, power + "current_power_limit") or field(element, power + "power_limit")),
        default_power_limit_w=watts(field(element, power + "default_power_limit")),
        persistence=field(element, "persistence_mode"),
        compute_mode=field(element, "compute_mode"),
        mig=field(element, "mig_mode/current_mig"),
        mig_devices=len(element.findall("mig_devices/mig_device")),
        license=field(element, "vgpu_software_licensed_product/license_status"),
        ecc=field(element, "ecc_mode/current_ecc"),
        ecc_pending=field(element, "ecc_mode/pending_ecc"),
        fault=facts_smi.fault(element),
        recovery=facts_smi.recovery(element),
        uncorrected_errors=sum(errors),
        errors_beyond_limit=facts_smi.any_yes(
            element, "ecc_errors/aggregate/sram_threshold_exceeded", "ecc_errors/unrepairable_memory"
        ),
        repair_pending=facts_smi.any_yes(element, "ecc_errors/channel_repair_pending", "ecc_errors/tpc_repair_pending"),
        row_remapping_pending=field(element, "remapped_rows/remapped_row_pending") == "Yes",
        row_remapping_failed=field(element, "remapped_rows/remapped_row_failure") == "Yes",
        slowed=tuple(facts_smi.slowed(element)),
        processes=tuple(
            _process(machine, node, with_parent=count < _PARENTS)
            for count, node in enumerate(element.iterfind("processes/process_info"))
        ),
    )


def _uuid(element: ElementTree.Element) -> str:
    """Empty also in a recording, where it is blanked."""
    text = field(element, "uuid")
    return text if re.fullmatch(r"GPU-[0-9a-fA-F-]+", text) else ""


def _process(machine: Machine, node: ElementTree.Element, *, with_parent: bool) -> Process:
    pid, kind = number(field(node, "pid")) or 0, field(node, "type")
    status = machine.text(f"/proc/{pid}/status") if pid and with_parent and "C" in kind else ""
    parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
    orphan = parent is not None and parent[1] == "1"
    service = re.search(r"/system\.slice/([^/\s]+\.service)", machine.text(f"/proc/{pid}/cgroup") if orphan else "")
    name = (field(node, "process_name").split() or [""])[0]  # its arguments may be private
    return Process(
        pid=pid,
        kind=kind,
        name=(name.rpartition("/")[2] if name.startswith("/") else name) or "unnamed",
        used_mib=number(field(node, "used_memory")),
        parent=int(parent[1]) if parent else 0,
        service=service[1] if service else "",
    )
