"""How much memory the control groups of this process leave it: containers, services and batch jobs have such limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_sm120.doctor.machine import Machine

_ROOT = "/sys/fs/cgroup"
# Of version 2 and 1: the limit, what is used, and what begins the lines of files' pages, which the kernel gives back.
_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def memory_limit(machine: Machine, total: int) -> tuple[int, int] | None:
    """The lowest limit of the process's own group and those above it, and the least that any of them leaves, in bytes.

    Args:
        total: the machine's memory in bytes; limits that are no lower say nothing.

    Returns:
        None where there is no such limit, or it cannot be read.
    """
    limits, left = [], []
    for folder, (limit_file, usage_file, prefix) in _groups(machine.text("/proc/self/cgroup")):
        limit = _number(machine.text(f"{folder}/{limit_file}"))  # "max" is none
        if limit is None or limit >= total:
            continue
        limits.append(limit)
        used = _number(machine.text(f"{folder}/{usage_file}"))
        if used is not None:
            stat = machine.text(f"{folder}/memory.stat")
            files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
            left.append(max(0, limit - used + sum(map(int, files))))
    return (min(limits), min([*limits, *left])) if limits else None


def _groups(text: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Folders of the groups in /proc/self/cgroup that limit memory, from the process's own up to the root.

    A container may see the path as the host has it and the folders from its own group on: then only the root is there.
    """
    roots: tuple[str, ...]
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            roots, files = (_ROOT, f"{_ROOT}/unified"), _V2
        elif "memory" in controllers.split(","):
            roots, files = (f"{_ROOT}/memory",), _V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # a group outside of what this namespace shows
            parts = []
        for root in roots:
            for depth in range(len(parts), -1, -1):
                yield "/".join([root, *parts[:depth]]), files


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
