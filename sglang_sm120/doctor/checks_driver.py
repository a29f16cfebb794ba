"""Whether NVIDIA's driver answers, and if not, why; GPUs that are plugged in and that it does not have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from sglang_sm120.doctor.check import Check, listed
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.findings import Finding

LOG = "`sudo dmesg | grep -iE 'xid|nvrm|fallen'` says why"
LOST_FIX = (
    f"{LOG}; Xid 79 is a GPU that fell off the PCI bus\n"
    "reboot; a GPU that is still gone needs the power off and on\n"
    "if it comes back: power cables and supply, the riser, the slot, heat"
)
_OPEN_MODULES = "Blackwell needs NVIDIA's open kernel modules: install that flavour of the driver"
_GIVE = "docker run --gpus all, with NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def _mismatch(facts: Facts) -> list[str]:
    steps = [
        "the driver was updated under a running kernel module: reboot",
        "or end all that uses GPUs, then: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia",
    ]
    container = "the host's driver was updated under a running container: start the container anew"
    return [container, *steps] if facts.host.container else steps


def _no_module(facts: Facts) -> list[str]:
    if facts.host.container:
        return [f"give the container the GPUs: {_GIVE}", "on the host: nvidia-smi"]
    steps = [
        "sudo modprobe nvidia: its answer says what is missing",
        "after an update of the kernel: build the module for it (dkms status), with that kernel's headers",
        "with Secure Boot: sign the module (mokutil --sb-state), or switch it off",
        LOG,
    ]
    return [_OPEN_MODULES, *steps] if _proprietary(facts) else steps


def _none_found(facts: Facts) -> list[str]:
    if facts.host.container:
        return [f"give the container the GPUs: {_GIVE}", "on the host: nvidia-smi"]
    steps = [LOG, "the newest driver; then power cables, riser and slot"]
    return [_OPEN_MODULES, *steps] if _proprietary(facts) else steps


def _proprietary(facts: Facts) -> bool:
    return bool(facts.module) and "Open Kernel Module" not in facts.module


# What nvidia-smi says, in the order in which it is looked for, and what to do then.
_REASONS: tuple[tuple[str, Callable[[Facts], list[str]]], ...] = (
    (r"driver/library version mismatch|version mismatch", _mismatch),
    (r"couldn't communicate with the nvidia driver|driver not loaded", _no_module),
    (r"no devices were found", _none_found),
    (r"device handle|gpu is lost|fallen off the bus", lambda facts: LOST_FIX.split("\n")),
    (
        r"libnvidia-ml|shared library not found|function not found",
        lambda facts: (
            [f"give the container the driver's libraries: {_GIVE}"]
            if facts.host.container
            else ["install the driver's libraries anew, all of one version", "sudo ldconfig"]
        ),
    ),
    (
        r"blocked by the operating system",
        lambda facts: ["in WSL: `wsl --update` and the newest driver in Windows; no Linux driver inside"],
    ),
    (
        r"insufficient permissions|no permission",
        lambda facts: ["a user who may open /dev/nvidia*: ls -l /dev/nvidia*, and the group that owns them"],
    ),
    (
        # The devices of a running container are taken from it when systemd is reloaded.
        r"failed to initialize nvml: unknown error",
        lambda facts: (
            ["start the container anew", "to keep it from coming back: --device /dev/nvidia0 and so on, all named"]
            if facts.host.container
            else [LOG, "reboot"]
        ),
    ),
)


def _fix(facts: Facts) -> str:
    for pattern, steps in _REASONS:
        if re.search(pattern, facts.driver.detail, re.IGNORECASE):
            return "\n".join(steps(facts))
    return "\n".join(["sudo modprobe nvidia", LOG, *([_OPEN_MODULES] if _proprietary(facts) else [])])


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.gpus and driver.state in ("ok", "missing"):
        yield from _answers(facts)
    elif driver.state == "hung":
        told = f"; {driver.detail}" if driver.detail else ""
        if facts.torch.gpus:
            found = f"nvidia-smi does not answer in time, while CUDA starts on {len(facts.torch.gpus)} GPUs{told}"
            slow = "without persistence mode each GPU is started first: sudo systemctl enable --now nvidia-persistenced"
            yield Finding("warn", "driver", found, "a driver that answers", f"{slow}\n{LOG}")
            return
        found = f"nvidia-smi does not answer: a GPU or the driver is stuck{told}"
        yield Finding(
            "fail", "driver", found, "a driver that answers",
            f"{LOG}\nreboot; if it comes back, power off and look at risers, power and slots",
        )  # fmt: skip
    elif driver.state in ("failed", "ok"):
        if driver.lost:  # gpu.faults names them
            return
        said = driver.detail or "No devices were found"
        if not facts.pci_gpus and not facts.module and re.search("communicate|No devices", said):
            return  # no GPU and no driver: gpu.kind says so
        yield Finding("fail", "driver", f"nvidia-smi: {said}", "a driver that is loaded and fits", _fix(facts))
    elif driver.state == "missing" and (facts.pci_gpus or facts.module) and not facts.torch.gpus:
        needed = "NVIDIA's driver, with nvidia-smi"
        fix = "install the driver; in a container: --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        found = f"no nvidia-smi; {len(facts.pci_gpus)} NVIDIA GPUs on the PCI bus"
        yield Finding("warn" if facts.module else "fail", "driver", found, needed, fix)
    elif driver.state == "skipped" and facts.pci_gpus and not _loaded(facts):
        found = f"{len(facts.pci_gpus)} NVIDIA GPUs on the PCI bus, and NVIDIA's kernel module is not loaded"
        yield Finding("fail", "driver", found, "NVIDIA's driver", "sudo modprobe nvidia; or install the driver")


def _answers(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    kinds = Counter(gpu.name or "a GPU without a name" for gpu in driver.gpus)
    names = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if driver.state == "missing":
        yield Finding(
            "warn", "driver", f"no nvidia-smi; the kernel module has {names}: little of these GPUs can be looked at",
            "nvidia-smi", f"in a container: {_GIVE}; else install the driver's tools (nvidia-utils)",
        )  # fmt: skip
        return
    module = "open" if "Open Kernel Module" in facts.module else "proprietary" if facts.module else ""
    cuda = f"CUDA {driver.cuda}" if driver.cuda else ""
    kind = ", ".join(word for word in (cuda, f"{module} kernel module" if module else "") if word)
    yield Finding("ok", "driver", f"{driver.version or 'version unknown'}{f' ({kind})' if kind else ''}; {names}")
    if driver.detail and not driver.lost and not driver.inforoms:
        found = f"nvidia-smi answers for {len(driver.gpus)} GPUs, and ends with: {driver.detail}"
        yield Finding("warn", "driver", found, "an answer for every GPU", f"{LOG}\nreboot")


def _loaded(facts: Facts) -> bool:
    """Whether NVIDIA's kernel module is; a sandbox may show the GPUs without its files."""
    return bool(facts.module) or facts.host.container or any(gpu.driver == "nvidia" for gpu in facts.pci_gpus)


def _on_bus(facts: Facts) -> Iterator[Finding]:
    """GPUs that are plugged in and that the driver does not offer."""
    if facts.driver.state != "ok" or not facts.driver.gpus:
        return
    known = {gpu.bus_id for gpu in facts.driver.gpus} | {place for place, _ in facts.driver.lost}
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
            "every GPU that is plugged in", LOST_FIX,
        )  # fmt: skip


CHECKS = (
    Check("gpu.driver", _driver, quick=True),
    Check("gpu.on-bus", _on_bus),
)
