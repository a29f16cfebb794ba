"""The GPUs and their driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.facts_gpus import Gpu
from sglang_sm120.findings import Finding

_EMULATE = "only --sm120-emulate works here, slowly"
_LOG = "`dmesg | grep -iE 'xid|nvrm|fallen'` says why"
_UNSEEN_MIB = 1024
"""Memory in use without a process to show for it: more than a driver takes for itself. Guess: cards at rest show a few
hundred MiB at most in public texts of nvidia-smi."""


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.state == "ok" and driver.gpus:
        kinds = Counter(gpu.name for gpu in driver.gpus)
        names = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        module = "open" if "Open Kernel Module" in facts.module else "proprietary" if facts.module else ""
        kind = f", {module} kernel module" if module else ""
        yield Finding("ok", "driver", f"{driver.version} (CUDA {driver.cuda}{kind}); {names}")
    elif driver.state == "hung":
        yield Finding(
            "fail", "driver", "nvidia-smi does not answer: a GPU or the driver is stuck", "a driver that answers",
            f"{_LOG}\nreboot; if it comes back, power off and look at risers, power and slots",
        )  # fmt: skip
    elif driver.state == "failed":
        yield Finding(
            "fail", "driver", f"nvidia-smi: {driver.detail}", "a driver that is loaded and fits", _failed(facts)
        )
    elif driver.state == "missing" and (facts.pci_gpus or facts.module) and not facts.torch.gpus:
        needed = "NVIDIA's driver, with nvidia-smi"
        fix = "install the driver; in a container: --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        found = f"no nvidia-smi; {len(facts.pci_gpus)} NVIDIA GPUs on the PCI bus"
        yield Finding("warn" if facts.module else "fail", "driver", found, needed, fix)
    elif driver.state == "skipped" and facts.pci_gpus and not _loaded(facts):
        found = f"{len(facts.pci_gpus)} NVIDIA GPUs on the PCI bus, and NVIDIA's kernel module is not loaded"
        yield Finding("fail", "driver", found, "NVIDIA's driver", "sudo modprobe nvidia; or install the driver")


def _loaded(facts: Facts) -> bool:
    """Whether NVIDIA's kernel module is; a sandbox may show the GPUs without its files."""
    return bool(facts.module) or facts.host.container or any(gpu.driver == "nvidia" for gpu in facts.pci_gpus)


def _failed(facts: Facts) -> str:
    if "mismatch" in facts.driver.detail:
        return "the driver was updated under a running kernel module: reboot, or unload and load it again"
    steps = ["sudo modprobe nvidia", _LOG]
    if facts.module and "Open Kernel Module" not in facts.module:
        steps.insert(0, "Blackwell needs NVIDIA's open kernel modules: install that flavour of the driver")
    return "\n".join(steps)


def _on_bus(facts: Facts) -> Iterator[Finding]:
    """GPUs that are plugged in and that the driver does not offer."""
    if facts.driver.state != "ok":
        return
    known = {gpu.bus_id for gpu in facts.driver.gpus}
    missing = [gpu for gpu in facts.pci_gpus if gpu.bus_id not in known]
    passed = [gpu.bus_id for gpu in missing if gpu.driver.startswith("vfio")]
    lost = [gpu.bus_id for gpu in missing if gpu.bus_id not in passed]
    if passed:
        yield Finding("note", "GPUs of virtual machines", f"{listed(passed)}: bound to vfio-pci")
    # In a container /sys shows the host's GPUs, and the driver those that were given to it. Not every container is
    # known as one, so this is never more than a warning.
    if lost and not facts.host.container:
        yield Finding(
            "warn", "lost GPUs",
            f"on the PCI bus at {listed(lost)}, and the driver does not have them (a container that was given a part "
            "of the GPUs may look the same)",
            "every GPU that is plugged in", f"{_LOG}\nreboot; then power, risers and slots",
        )  # fmt: skip


def _kind(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus
    if not gpus and facts.torch.gpus:  # nvidia-smi is missing, torch sees them
        names = Counter(f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['capability']))}"
                        for gpu in facts.torch.gpus)  # fmt: skip
        right = all(gpu["capability"][0] == 12 for gpu in facts.torch.gpus)
        found = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding("ok" if right else "warn", "GPU", found, fix="" if right else _EMULATE)
    elif not gpus:
        if facts.driver.state in ("missing", "ok") and not facts.pci_gpus:
            torch = "; a CPU build of torch" if facts.torch.version and not facts.torch.cuda else ""
            yield Finding("warn", "GPU", f"no CUDA GPU here{torch}", "an SM120 GPU", _EMULATE)
    else:
        others = [gpu for gpu in gpus if not gpu.is_sm120]
        if others:
            names_of = ", ".join(dict.fromkeys(f"{gpu.name}{_capability(gpu)}" for gpu in others))
            fix = (
                _EMULATE
                if len(others) == len(gpus)
                else (f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={_sm120(gpus)} leaves them out")
            )
            yield Finding("warn", "GPU", f"not SM120: {names_of}", "compute capability 12.x", fix)
        if len({(gpu.name, gpu.memory_mib) for gpu in gpus}) > 1:
            names_of = ", ".join(f"GPU {gpu.index} {gpu.name} ({(gpu.memory_mib or 0) >> 10} GiB)" for gpu in gpus)
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
    gpus = facts.driver.gpus
    users: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
    for gpu in gpus:
        for process in gpu.processes:
            if "C" in process.kind:
                key = (process.pid, process.name, process.parent)
                users.setdefault(key, []).append((gpu.index, process.used_mib))
    for left, level, what in ((True, "warn", "left over"), (False, "note", "GPUs in use")):
        told = [
            f"{name} (process {pid}) on GPU {listed(index for index, _ in on)}, {sum(mib for _, mib in on)} MiB"
            for (pid, name, parent), on in users.items()
            if (parent == 1 and not facts.host.container) == left
        ]
        if told:
            why = (
                "its parent is gone, unless it is a service or was started with nohup"
                if left
                else "its memory is missing for a server"
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


def _mode(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus
    if split := [gpu.index for gpu in gpus if gpu.mig == "Enabled"]:
        yield Finding(
            "warn", "MIG", f"on, on GPU {listed(split)}",
            "whole GPUs: parts have no peer-to-peer memory, and a server takes one part", "sudo nvidia-smi -mig 0",
        )  # fmt: skip
    if barred := [gpu.index for gpu in gpus if gpu.compute_mode == "Prohibited"]:
        fix = "sudo nvidia-smi -c DEFAULT"
        yield Finding("fail", "compute mode", f"prohibited on GPU {listed(barred)}", "default", fix)
    if alone := [gpu.index for gpu in gpus if gpu.compute_mode.startswith("Exclusive")]:
        found = f"exclusive on GPU {listed(alone)}: one process each, so `bench` and `tune` fail beside a server"
        yield Finding("note", "compute mode", found, "default", "sudo nvidia-smi -c DEFAULT")
    if idle := [gpu.index for gpu in gpus if gpu.persistence == "Disabled"]:
        found = f"off on GPU {listed(idle)}: the driver starts anew for each first process, and settings are lost"
        yield Finding("note", "persistence mode", found, fix="sudo systemctl enable --now nvidia-persistenced")


def _memory_errors(facts: Facts) -> Iterator[Finding]:
    gpus = facts.driver.gpus
    if broken := [gpu for gpu in gpus if gpu.uncorrected_errors or gpu.row_remapping_failed]:
        told = [
            f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrectable"
            + (", row remapping failed" if gpu.row_remapping_failed else "")
            for gpu in broken
        ]
        fix = "reboot; if it comes back the card goes to its maker"
        yield Finding("warn", "memory errors", listed(told), "none", fix)
    if pending := [gpu.index for gpu in gpus if gpu.ecc != gpu.ecc_pending]:
        yield Finding("note", "ECC", f"another setting waits for a reboot on GPU {listed(pending)}", fix="reboot")


def _power(facts: Facts) -> Iterator[Finding]:
    gpus = [gpu for gpu in facts.driver.gpus if gpu.power_limit_w and gpu.default_power_limit_w]
    limited = [gpu for gpu in gpus if (gpu.power_limit_w or 0) < (gpu.default_power_limit_w or 0)]
    if limited:
        told = [f"GPU {gpu.index} {gpu.power_limit_w:.0f} of {gpu.default_power_limit_w:.0f} W" for gpu in limited]
        yield Finding(
            "note", "power limit", f"below the card's default: {listed(told)}",
            "the default for the highest clocks; equal limits in a tensor-parallel group",
            "if it is not meant so: sudo nvidia-smi -pl WATTS (lost at a reboot)",
        )  # fmt: skip
    if slowed := [gpu for gpu in facts.driver.gpus if gpu.slowed]:
        told = [f"GPU {gpu.index} {' '.join(gpu.slowed)}" for gpu in slowed]
        yield Finding(
            "warn", "clocks held down", listed(told), "clocks that heat and power supply do not limit",
            "air and fans (thermal); power cables and supply (power brake); nvidia-smi -q -d PERFORMANCE",
        )  # fmt: skip


CHECKS = (
    Check("gpu.driver", _driver, quick=True),
    Check("gpu.on-bus", _on_bus),
    Check("gpu.kind", _kind),
    Check("gpu.processes", _processes),
    Check("gpu.mode", _mode),
    Check("gpu.memory-errors", _memory_errors),
    Check("gpu.power", _power),
)
