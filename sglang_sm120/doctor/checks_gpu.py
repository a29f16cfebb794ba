"""The GPUs: their kind, their health, who uses them, and how they are set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.checks_driver import LOG, LOST_FIX
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.facts_gpus import Gpu
from sglang_sm120.findings import Finding

_EMULATE = "only --sm120-emulate works here, slowly"
_UNSEEN_MIB = 1024
"""Memory in use without a process to show for it: more than a driver takes for itself. Guess: cards at rest show a few
hundred MiB at most in public texts of nvidia-smi."""


def _kind(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus
    if facts.torch.gpus and (not gpus or facts.driver.state == "missing"):  # torch knows more than the kernel module
        names = Counter(f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['capability']))}"
                        for gpu in facts.torch.gpus)  # fmt: skip
        right = all(gpu["capability"][0] == 12 for gpu in facts.torch.gpus)
        found = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding("ok" if right else "warn", "GPU", found, fix="" if right else _EMULATE)
    elif not gpus:
        absent = facts.driver.state in ("missing", "ok", "failed") and not facts.driver.lost
        if absent and not facts.pci_gpus and not facts.module:
            torch = "; a CPU build of torch" if facts.torch.version and not facts.torch.cuda else ""
            yield Finding("warn", "GPU", f"no CUDA GPU here{torch}", "an SM120 GPU", _EMULATE)
    else:
        # Of one in trouble the driver may not even know the name; gpu.faults has it.
        others = [gpu for gpu in gpus if not gpu.is_sm120 and not (gpu.fault and not gpu.name)]
        if others:
            names_of = ", ".join(dict.fromkeys(f"{gpu.name or 'no name'}{_capability(gpu)}" for gpu in others))
            fix = _EMULATE if len(others) == len(gpus) else (
                f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={_sm120(gpus)} leaves them out"
            )  # fmt: skip
            # What CUDA_VISIBLE_DEVICES left out, torch does not have.
            seen = facts.torch.gpus or ()
            hidden = bool(seen) and all(gpu["capability"][0] == 12 for gpu in seen)
            level, what = ("note", ", and hidden from torch") if hidden else ("warn", "")
            yield Finding(level, "GPU", f"not SM120{what}: {names_of}", "compute capability 12.x", fix)
        # Of one in trouble the memory may not be known.
        kinds = _grouped((f"{gpu.name} ({gpu.memory_mib >> 10} GiB)", gpu) for gpu in gpus if gpu.memory_mib)
        if len(kinds) > 1:
            names_of = "; ".join(f"GPU {listed(gpu.index for gpu in those)}: {kind}" for kind, those in kinds)
            yield Finding(
                "note", "different GPUs", names_of,
                "equal ones in a tensor-parallel group: the smallest memory and the slowest clock count for all",
                "CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES choose",
            )  # fmt: skip
        if not others:
            yield Finding("ok", "GPU", f"{len(gpus)} x SM120{_capability(gpus[0])}")


def _capability(gpu: Gpu) -> str:
    return "" if gpu.capability is None else f" (compute capability {gpu.capability[0]}.{gpu.capability[1]})"


def _sm120(gpus: tuple[Gpu, ...]) -> str:
    return ",".join(str(gpu.index) for gpu in gpus if gpu.is_sm120)


def _processes(facts: Facts) -> Iterator[Finding]:
    gpus = facts.gpus
    users: dict[tuple[int, str], tuple[bool, list[tuple[int, int | None]]]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if "C" not in process.kind:
                continue
            # Windows on a screen compute too ("C+G"), and a service's parent is 1 as that of one that was left over.
            alone = process.parent == 1 and process.kind == "C" and not process.service
            name = process.name + (f", service {process.service}" if process.service else "")
            key = (process.pid, name)
            users.setdefault(key, (alone and not facts.host.container, []))[1].append((gpu.index, process.used_mib))
    for left, level, what in ((True, "warn", "left over"), (False, "note", "GPUs in use")):
        told = [
            f"{name} (process {pid}) on GPU {listed(index for index, _ in on)}, {_memory(mib for _, mib in on)}"
            for (pid, name), (alone, on) in users.items()
            if alone == left
        ]
        if told:
            why = (
                "its parent is gone, unless it was started with nohup" if left else "its memory is missing for a server"
            )
            fix = "end it by its number, if it is yours and no longer wanted: kill NUMBER" if left else ""
            yield Finding(level, what, f"{listed(told, 4)}: {why}", fix=fix)
    unseen = [gpu for gpu in gpus if not gpu.processes and (gpu.used_mib or 0) > _UNSEEN_MIB]
    if unseen:
        told = [f"GPU {gpu.index} {gpu.used_mib} MiB" for gpu in unseen]
        yield Finding(
            "note", "GPU memory in use", f"{listed(told)}, by processes that are not visible here",
            fix="from the host, not from a container: nvidia-smi, and `sudo fuser -v /dev/nvidia*`",
        )  # fmt: skip


def _memory(sizes: Iterable[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return f"{sum(known)} MiB" if known else "memory not shown"


def _mode(facts: Facts) -> Iterator[Finding]:
    gpus = facts.gpus
    if split := [gpu.index for gpu in gpus if gpu.mig == "Enabled"]:
        parts = sum(gpu.mig_devices for gpu in gpus)
        made = f"{parts} parts" if parts else "and no part is made: CUDA has no device there"
        yield Finding(
            "warn", "MIG", f"on, on GPU {listed(split)}; {made}",
            "whole GPUs: parts have no peer-to-peer memory, and a server takes one part", "sudo nvidia-smi -mig 0",
        )  # fmt: skip
    if barred := [gpu.index for gpu in gpus if gpu.compute_mode == "Prohibited"]:
        fix = "sudo nvidia-smi -c DEFAULT"
        yield Finding("fail", "compute mode", f"prohibited on GPU {listed(barred)}", "default", fix)
    if alone := [gpu.index for gpu in gpus if gpu.compute_mode.startswith("Exclusive")]:
        found = f"exclusive on GPU {listed(alone)}: one process each, so `bench` and `tune` fail beside a server"
        yield Finding("note", "compute mode", found, "default", "sudo nvidia-smi -c DEFAULT")
    if unlicensed := [gpu.index for gpu in gpus if gpu.license.lower().startswith("unlicensed")]:
        found = f"none on GPU {listed(unlicensed)}: the driver slows a virtual GPU down without it"
        yield Finding(
            "warn", "vGPU licence", found, "a licence", "nvidia-smi -q says its state; the licence server's token"
        )
    if waiting := [gpu.index for gpu in gpus if gpu.ecc and gpu.ecc_pending and gpu.ecc != gpu.ecc_pending]:
        yield Finding("note", "ECC", f"another setting waits for a reboot on GPU {listed(waiting)}", fix="reboot")
    if idle := [gpu.index for gpu in gpus if gpu.persistence == "Disabled"]:
        found = f"off on GPU {listed(idle)}: the driver starts anew for each first process, and settings are lost"
        yield Finding("note", "persistence mode", found, fix="sudo systemctl enable --now nvidia-persistenced")


_RESET = "end all that uses it, then: sudo nvidia-smi --gpu-reset -i {places}; or reboot (in a guest: by the host)"
_RECOVERIES = {
    "Reset": ("fail", _RESET),
    "Reboot": ("fail", "reboot: the fault may have reached the operating system"),
    "Drain P2P": (
        "fail",
        "end all that sends data between GPUs, then look again (nvidia-smi -q): the driver then says what comes next",
    ),
    "Drain and Reset": (
        "warn",
        "it works with a part of its memory or units: end what uses it, then: sudo nvidia-smi --gpu-reset -i {places}",
    ),
}
"""The driver's words for "GPU Recovery Action", as NVML documents them: level, and what to do."""


def _faults(facts: Facts) -> Iterator[Finding]:
    """GPUs that are broken or that the driver wants reset."""
    found = list(_all_faults(facts))
    if not found and facts.driver.gpus and facts.driver.state == "ok":
        found = [Finding("ok", "GPU faults", "the driver reports none")]
    yield from found


def _all_faults(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus
    if facts.driver.lost:
        told = [f"{place}: {words}" if place not in words.lower() else words for place, words in facts.driver.lost]
        rest = f"; {len(gpus)} others answer" if gpus else ""
        yield Finding("fail", "lost GPU", f"{listed(told, 4)}{rest}", "a GPU that answers", LOST_FIX)
    for words, those in _grouped((gpu.fault, gpu) for gpu in gpus if gpu.fault):
        reset = "reset" in words.lower()
        fix = f"{_reset(those)}\n{LOG}" if reset else LOST_FIX
        yield Finding("fail", "GPU fault", f"{_named(those)}: the driver says {words!r}", "a GPU that answers", fix)
    for action, those in _grouped((gpu.recovery, gpu) for gpu in gpus if gpu.recovery):
        level, fix = _RECOVERIES.get(action, ("fail", "nvidia-smi -q says it as GPU Recovery Action; reboot"))
        fix = f"{fix.format(places=_places(those))}\n{LOG}"
        yield Finding(level, "GPU recovery", f"{_named(those)}: the driver asks for {action!r}", "none", fix)
    gpus = facts.gpus
    if failed := [gpu for gpu in gpus if gpu.row_remapping_failed or gpu.errors_beyond_limit]:
        why = "memory that failed could not be replaced, or more of it failed than the maker allows"
        fix = "have the card replaced: its maker takes this as a defect"
        yield Finding("warn", "memory errors", f"{_named(failed)}: {why}", "memory without faults", fix)
    if pending := [gpu for gpu in gpus if gpu.row_remapping_pending and not gpu.recovery]:
        found = f"{_named(pending)}: memory that failed is replaced at the next reset"
        yield Finding("warn", "row remapping", found, "none pending", _reset(pending))
    if parts := [gpu for gpu in gpus if gpu.repair_pending and not gpu.recovery]:
        found = f"{_named(parts)}: a channel of its memory or a part of its processors is replaced at the next reset"
        yield Finding("warn", "repair", found, "none pending", _reset(parts))
    if wrong := [gpu for gpu in gpus if gpu.uncorrected_errors and gpu not in failed]:
        told = [f"GPU {gpu.index} ({gpu.bus_id}): {gpu.uncorrected_errors} uncorrectable" for gpu in wrong]
        fix = f"{LOG}\nreboot; if it comes back the card goes to its maker"
        yield Finding("warn", "memory errors", f"{listed(told)} since the driver was loaded", "none", fix)
    if facts.driver.inforoms:
        found = f"damaged on {listed(facts.driver.inforoms)}: serial number and record of errors are lost"
        yield Finding(
            "note", "infoROM", found, fix="it computes all the same; a new VBIOS of the card's maker may mend it"
        )


def _grouped(pairs: Iterable[tuple[str, Gpu]]) -> list[tuple[str, list[Gpu]]]:
    groups: dict[str, list[Gpu]] = {}
    for words, gpu in pairs:
        groups.setdefault(words, []).append(gpu)
    return list(groups.items())


def _named(gpus: Iterable[Gpu]) -> str:
    return listed(f"GPU {gpu.index} ({gpu.bus_id})" for gpu in gpus)


def _places(gpus: Iterable[Gpu]) -> str:
    return ",".join(gpu.bus_id for gpu in gpus)


def _reset(gpus: Iterable[Gpu]) -> str:
    return _RESET.format(places=_places(gpus))


def _power(facts: Facts) -> Iterator[Finding]:
    gpus = [gpu for gpu in facts.gpus if gpu.power_limit_w and gpu.default_power_limit_w]
    limited = [gpu for gpu in gpus if (gpu.power_limit_w or 0) < (gpu.default_power_limit_w or 0)]
    if limited:
        told = [f"GPU {gpu.index} {gpu.power_limit_w:.0f} of {gpu.default_power_limit_w:.0f} W" for gpu in limited]
        yield Finding(
            "note", "power limit", f"below the card's default: {listed(told)}",
            "the default for the highest clocks; equal limits in a tensor-parallel group",
            "if it is not meant so: sudo nvidia-smi -pl WATTS (lost at a reboot)",
        )  # fmt: skip
    if slowed := [gpu for gpu in facts.gpus if gpu.slowed]:
        told = [f"GPU {gpu.index} {' '.join(gpu.slowed)}" for gpu in slowed]
        yield Finding(
            "warn", "clocks held down", listed(told), "clocks that heat and power supply do not limit",
            "air and fans (thermal); power cables and supply (power brake); nvidia-smi -q -d PERFORMANCE",
        )  # fmt: skip


CHECKS = (
    Check("gpu.faults", _faults),
    Check("gpu.kind", _kind),
    Check("gpu.processes", _processes),
    Check("gpu.mode", _mode),
    Check("gpu.power", _power),
)
