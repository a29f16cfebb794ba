"""The host's own resources, the environment of the process, and what `tune` has measured here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_sm120.doctor.check import Check
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.findings import Finding

_SHARED_BYTES = 1 << 30
"""NVIDIA's guide to NCCL in containers asks for --shm-size=1g; a container has 64 MiB unless told."""
_OPEN_FILES = 65535
"""What SGLang 0.5.23 raises its own limit to (`set_ulimit`), as far as the hard limit lets it."""


def _shared(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host.shared is None:
        return
    fix = "docker run --ipc=host or --shm-size 32g; else: sudo mount -o remount,size=50% /dev/shm"
    if host.shared < _SHARED_BYTES:
        found = f"{host.shared >> 20} MiB: NCCL and SGLang's processes share memory there"
        yield Finding("warn", "/dev/shm", found, "1 GiB or more", fix)
    elif host.shared_free is not None and host.shared_free < _SHARED_BYTES:
        found = f"{host.shared_free >> 20} MiB free of {host.shared >> 20}"
        yield Finding(
            "warn", "/dev/shm", found, "1 GiB free", "files of servers that were killed may lie there: ls -l /dev/shm"
        )
    else:
        yield Finding("ok", "/dev/shm", f"{_gib(host.shared)}, {_gib(host.shared_free)} free")


def _limits(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host.files_hard is None:
        return
    if 0 <= host.files_hard < _OPEN_FILES:
        fix = "docker run --ulimit nofile=1048576; else in /etc/security/limits.conf, or LimitNOFILE= of the service"
        found = f"{host.files_hard} at most: with many requests at once connections are refused"
        yield Finding("note", "open files", found, f"a hard limit of {_OPEN_FILES} or more", fix)
    else:
        locked = (
            "" if host.locked is None else f"; locked memory {'unlimited' if host.locked < 0 else _gib(host.locked)}"
        )
        most = "unlimited" if host.files_hard < 0 else host.files_hard
        yield Finding("ok", "limits", f"open files {most}{locked} (RDMA between hosts needs unlimited)")


def _memory(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host.memory is None or host.available is None:
        return
    nodes = f" on {len(host.nodes)} NUMA nodes" if len(host.nodes) > 1 else ""
    within = " that the control group of this process allows" if host.limit is not None else nodes
    found = f"{_gib(host.available)} available of {_gib(host.memory)}{within}"
    if host.available * 10 < host.memory:
        fix = "end what holds it: ps aux --sort=-rss | head"
        if host.limit is not None:
            fix += "\nraise the limit: docker run --memory, MemoryMax= of the service, or what the job asked for"
        yield Finding("warn", "memory", found, "room to load the weights through", fix)
    else:
        yield Finding("ok", "memory", found)


def _gib(size: int | None) -> str:
    if size is None:
        return "?"
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.0f} {unit}"
    return f"{size >> 10} KiB"


# Variable, the values that matter (None: any), level, what they do, what to do.
_VARIABLES: tuple[tuple[str, str | None, str, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", "1", "warn", "every kernel is waited for", "unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warn", "every tensor is allocated by the driver", "unset it"),
    ("NCCL_SHM_DISABLE", "1", "warn", "NCCL may not use shared memory, its way where there is no P2P", "unset it"),
    ("NCCL_P2P_LEVEL", "LOC", "warn", "NCCL never uses P2P", "unset it, or SYS where P2P works"),
    ("NCCL_IB_DISABLE", "1", "note", "NCCL goes over sockets between hosts; one host does not care", ""),
    ("NCCL_ALGO", None, "note", "NCCL's own choice is overridden", "unset it, unless you measured"),
    ("NCCL_PROTO", None, "note", "NCCL's own choice is overridden", "unset it, unless you measured"),
    ("NCCL_DEBUG", "INFO", "note", "NCCL logs a great deal", "unset it"),
    ("NCCL_DEBUG", "TRACE", "warn", "NCCL logs every call", "unset it"),
    ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "1", "note", "SGLang's pcie_ipc is on", "--sm120-all-reduce stock instead"),
)  # fmt: skip


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, value, level, does, fix in _VARIABLES:
        given = facts.environ.get(name, "")
        if given and (value is None or given.upper() == value):
            yield Finding(level, name, f"{given}: {does}", fix=fix)
    archs = facts.environ.get("FLASHINFER_CUDA_ARCH_LIST", "")
    if archs and facts.sm120_capabilities and not re.search(r"(^|[\s;])12\.", archs):
        found = f"{archs!r} leaves out 12.x: FlashInfer compiles nothing for these GPUs"
        yield Finding("fail", "FLASHINFER_CUDA_ARCH_LIST", found, "12.0f, or unset", "unset it")
    path = facts.environ.get("LD_LIBRARY_PATH", "")
    if re.search(r"cuda[^:]*/compat", path) and any("GeForce" in gpu.name for gpu in facts.driver.gpus):
        found = "has CUDA's compat folder: GeForce cards refuse those libraries (error 804)"
        yield Finding("warn", "LD_LIBRARY_PATH", found, "the driver's own libcuda", "take the compat folder out")


def _profiles(facts: Facts) -> Iterator[Finding]:
    """What the server chooses kernels by (docs/tuning.md)."""
    if not facts.sm120_capabilities and not facts.profiles:
        return
    for entry in facts.profiles:
        kind, state, detail = entry["kind"], entry["state"], entry["detail"]
        again = "sglang-sm120 tune --comm" if kind.startswith("all-reduce") else "sglang-sm120 tune --model FOLDER"
        what = f"profile, {kind}"
        if state == "ok":
            yield Finding("ok", what, f"{detail}: {entry['path']}")
        elif state == "none":
            found = "none: kernels are chosen by shipped defaults, which are guesses"
            yield Finding("note", what, found, "what was measured on this machine", again)
        elif state == "elsewhere":
            found = f"not used, since it is of another machine or other versions: {detail}"
            yield Finding("warn", what, found, "a profile of this machine and these versions", again)
        else:
            yield Finding("warn", what, f"cannot be used: {detail}", f"what `{again}` writes", again)


CHECKS = (
    Check("host.shared-memory", _shared, quick=True),
    Check("host.limits", _limits, quick=True),
    Check("host.memory", _memory, quick=True),
    Check("environment.variables", _variables, quick=True),
    Check("profile.profiles", _profiles),
)
