"""Which paths a report may show: those of the system and, below site-packages, of packages. All others are blanked."""

from __future__ import annotations

import re

PIECE = r"[^\s/\"'<>:,;()|`\\]+"
_PACKAGES = ("/site-packages", "/dist-packages")
_SYSTEM = (
    ".dockerenv", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr",
)  # fmt: skip
_HOMES = ("home", "Users", "root")
# Folders of the system that people and programs put names into: what of them stays.
_INSIDE = {
    "dev": re.compile(r"shm|nvidia[\w*-]*|infiniband|dri|vfio|kfd|null|zero|full|std(?:in|out|err)|fd|kmsg"),
    "etc": re.compile(r"modprobe\.d|modules-load\.d|security|ld\.so\.[\w.]+|default|sysctl\.d"),
    "run": re.compile(r"\.containerenv|systemd|nvidia[\w-]*"),
}
_LOCAL = re.compile(r"cuda[\w.-]*|nvidia[\w.-]*|bin|sbin|lib\w*|include|share")
_KEPT = "/var/run/secrets/kubernetes.io"  # by which doctor knows a container

_START = r"(?:(?<![\w./<~\]-])|(?<=-[IL])|(?<=[\s\"'=]-[A-Za-z])|(?<=\\[nt]))"
_NOT_CGROUP = r"(?<!\d::)(?<!\bmemory:)"  # those lines are redact.py's
# A name may have blanks in it where a slash follows soon; those of the system have none.
_OF_SYSTEM = rf"(?=(?:{'|'.join(map(re.escape, _SYSTEM))})(?:[/\s\"'<>:,;()|`\\]|$))"
PATH = re.compile(
    rf"{_START}{_NOT_CGROUP}/(?!/)(?:{_OF_SYSTEM}[^\s\"'<>:,;()|`\\]+"
    rf"|(?:{PIECE}(?: {PIECE}){{0,3}}/+)*(?:{PIECE})?)"
)
QUOTED = re.compile(r"(?<=([\"']))/[^\"'\n<>]+(?=\1)")
USER = re.compile(rf"/(?:home|Users)/({PIECE}(?: {PIECE}){{0,3}}(?=/)|{PIECE})")
"""Whose home folder it is."""


def blanked(path: str) -> str:
    """A path as it may be shown: whole, in part, or "[home]" or "[path]" with what a package manager made below."""
    if path.strip("/") == "" or path == _KEPT:
        return path
    first, *rest = path.lstrip("/").split("/")
    if first in _SYSTEM:
        return _system(path, first, rest)
    blank = "[home]" if first in _HOMES else "[path]"
    at = max(path.find(folder) for folder in _PACKAGES)
    tail = path[at:] if at >= 0 else ""
    return blank + (tail if re.fullmatch(r"[\w./+-]*", tail) else "")


def _system(path: str, first: str, rest: list[str]) -> str:
    if not rest or not rest[0]:
        return path
    if first in _INSIDE and not _INSIDE[first].fullmatch(rest[0]):
        return f"/{first}/[...]"
    if path.startswith("/dev/shm/") and rest[1]:
        return "/dev/shm/[...]"
    if first == "usr" and rest[0] == "local" and len(rest) > 1 and rest[1] and not _LOCAL.fullmatch(rest[1]):
        return "/usr/local/[...]"
    return path


def cgroup(path: str) -> str:
    """A control group's path with only those names that every machine has: others are of services, pods and jobs."""
    known = re.compile(
        r"|docker|kubepods|kubepods(?:-(?:burstable|besteffort))?\.slice|lxc|lxc\.payload|init\.scope|system\.slice|user\.slice|"
        r"machine\.slice|containerd\.service|docker\.service|memory|unified|slurm|\[\.\.\.\]"
    )
    return "/".join(part if known.fullmatch(part) else "[...]" for part in path.split("/"))
