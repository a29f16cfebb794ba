"""Takes out of a text what says whose machine it is: people attach reports to public pages.

Blanked: host and user names, home folders and other private paths, serial numbers, UUIDs, hardware and network
addresses, container ids, values of variables that sound secret, and what of the kernel's command line is none of ours.
Left: versions, names of products, PCI bus addresses, process ids, paths of the system and of packages.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

# Names that say nothing about anyone, and that ordinary texts are full of.
_COMMON = frozenset(
    [
        "root", "user", "users", "ubuntu", "debian", "admin", "administrator", "nvidia", "docker", "localhost",
        "local", "localdomain", "host", "home", "runner", "guest", "nobody", "default", "linux", "server", "node",
        "gpu", "sglang", "python", "torch", "cuda", "work", "data", "shared", "public", "path", "mac", "ip", "uuid",
        "serial", "id", "mail",
    ]
)  # fmt: skip
_SYSTEM = (".dockerenv", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr")
_KERNEL_WORDS = re.compile(
    r"^(?:(?:amd_|intel_)?iommu[\w.]*|pci[\w.]*|nvidia[\w.-]*|nouveau[\w.]*|mitigations|hugepages\w*|default_hugepagesz|"
    r"numa\w*|pcie_\w+|transparent_hugepage|modprobe\.blacklist|isolcpus|nohz_full|swiotlb|quiet|splash|ro|rw|"
    r"intel_pstate|amd_pstate|processor\.\w+|console|nomodeset)(?:=|$)"
)
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
_HOMES = r"/(?:home|Users)/([^\s/\"'<>:,;\\]+)"
_DOMAIN = r"(?:\.[A-Za-z0-9-]+)*"  # a name may be followed by its domain
_EDGE, _END = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"


@dataclass(frozen=True)
class Identity:
    """Names that are to be blanked wherever they stand alone."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    @classmethod
    def of_this_machine(cls) -> Identity:
        """What the system calls itself and its user; what cannot be asked is left out."""
        hosts, users = set(), set()
        for ask in (socket.gethostname, lambda: os.uname().nodename):
            try:
                name = ask()
            except (OSError, AttributeError):
                continue
            hosts |= {name, name.partition(".")[0]}
        with contextlib.suppress(OSError, KeyError, ImportError):  # no such user in a container
            users.add(getpass.getuser())
        users |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
        users.add(os.path.basename(os.path.expanduser("~")))
        return cls(tuple(sorted(hosts - {""})), tuple(sorted(users - {""})))


def redact(text: str, identity: Identity) -> str:
    """The text with blanks in square brackets, so that XML stays XML and JSON JSON; again, it changes nothing."""
    users = {*identity.users, *re.findall(_HOMES, text)}
    for pattern, blank in _PATTERNS:
        text = pattern.sub(blank, text)
    for names, blank, rest in ((identity.hosts, "[host]", _DOMAIN), (users, "[user]", "")):
        for name in sorted(names, key=len, reverse=True):  # the longer name first: "ann-b" before "ann"
            if name.lower() not in _COMMON and not name.startswith("[") and len(name) > 1:
                text = re.sub(_EDGE + re.escape(name) + rest + _END, blank, text, flags=re.IGNORECASE)
    return text


def kernel_arguments(text: str) -> str:
    """A kernel command line with the values of all words blanked that are not about what doctor looks at."""
    return " ".join(
        word if _KERNEL_WORDS.match(word) else f"{word.partition('=')[0]}=[...]" if "=" in word else word
        for word in text.split()
        if "=" in word or _KERNEL_WORDS.match(word)
    )


def variables(environ: dict[str, str]) -> dict[str, str]:
    """An environment with the values blanked of variables whose names sound secret."""
    return {name: "[...]" if _SECRET.search(name) else value for name, value in environ.items()}


def _path(match: re.Match[str]) -> str:
    """A path of the system stays; of another, what a package manager made of it."""
    path = match[0]
    first = path.split("/")[1]
    if first in _SYSTEM or not first:
        return path
    for keep in ("/site-packages", "/dist-packages"):
        at = path.find(keep)
        if at >= 0:
            return f"[path]{path[at:]}"
    return "[path]"


def _program(match: re.Match[str]) -> str:
    """Of a process its program: its arguments may be anything."""
    first = (match[2].split() or [""])[0]
    return match[1] + first.rpartition("/")[2]


_Blank = str | Callable[[re.Match[str]], str]
_PATTERNS: tuple[tuple[re.Pattern[str], _Blank], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), blank)
    for pattern, blank in (
        (r"(<process_name>)([^<]+)", _program),
        (r"\b(?:GPU|MIG|GI|CI)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "[uuid]"),
        (r"(?<![0-9a-f])[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}(?![0-9a-f])", "[uuid]"),  # "_": of a pod
        (r"(Device Serial Number:? )[0-9a-f]{2}(?:-[0-9a-f]{2}){7}", r"\1[serial]"),
        (r"(<(?:\w*serial\w*|module_id|host_id|pdi|\w*guid|\w*uuid)>)[^<]+", r"\1[...]"),
        (r"(\bserial(?:[ _]?(?:number|no\.?|num))?\s*[:=#]\s*)(?!\[)[^\s\"'<>,;\\]+", r"\1[serial]"),
        (r"(?<![0-9a-f:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?:[:-][0-9a-f]{2}){0,14}(?![0-9a-f-]|:[0-9a-f])", "[mac]"),
        (r"(?<![\w:.])(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}(?!\w|:\w)", "[ip]"),
        # A double colon needs groups on one side, so C++ names such as torch::cuda stay, and PCI addresses have none.
        (
            r"(?<![\w:.])(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6})?::(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6})(?!\w|:\w)",
            "[ip]",
        ),
        (r"(?<!\d)(?<!\d\.)\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)", "[ip]"),
        # Of another host than this one: who built the kernel module stands in /proc/driver/nvidia/version.
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*", "[mail]"),
        (r"://(?!(?:[\w-]+\.)*(?:nvidia|pytorch|github)\.(?:com|org)(?![\w.@:-]))[^\s\"'<>\\]+", "://[...]"),
        (r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])", "[id]"),
        (
            r"(?:(?:/home|/Users)/[^\s/\"'<>:,;\\]+|/root(?![\w.-]))(?:/[^\s\"'<>:,;\\]*)?",
            lambda match: _home(match[0]),
        ),
        # Also behind a compiler's -I and -L, and behind a line break as JSON writes it.
        (r"(?:(?<![\w./<~\]-])|(?<=-[IL])|(?<=\\n))/(?!/)[^\s\"'<>:,;()|`\\]+", _path),
    )
)


def _home(path: str) -> str:
    at = max(path.find("/site-packages"), path.find("/dist-packages"))
    return f"[home]{path[at:]}" if at >= 0 else "[home]"


def redact_all(parts: dict[str, str], identity: Identity) -> dict[str, str]:
    """Every part, with the user names that one part gives away blanked in all."""
    everything = "\n".join(parts.values())
    found = re.findall(_HOMES, everything)
    known = Identity(identity.hosts, tuple(sorted({*identity.users, *found})))
    return {name: redact(text, known) for name, text in parts.items()}
