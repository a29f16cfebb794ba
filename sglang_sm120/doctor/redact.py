"""Takes out of a text what says whose machine it is: people attach reports to public pages.

Blanked: host and user names, home folders and other private paths, serial numbers, UUIDs, hardware and network
addresses, container ids, tokens and passwords, programs that are not known, and what of the kernel's command line is
none of ours. Left: versions, names of products, PCI bus addresses, process ids, paths of the system and of packages.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_sm120.doctor import redact_paths, redact_variables
from sglang_sm120.doctor.redact_words import COMMON, DOMAINS, PROGRAMS, TOKENS, TOP_LEVEL

_KERNEL_WORDS = re.compile(
    r"^(?:(?:amd_|intel_)?iommu[\w.]*|pci[\w.]*|nvidia[\w.-]*|nouveau[\w.]*|mitigations|hugepages\w*|default_hugepagesz|"
    r"numa\w*|pcie_\w+|transparent_hugepage|modprobe\.blacklist|isolcpus|nohz_full|swiotlb|quiet|splash|ro|rw|"
    r"intel_pstate|amd_pstate|processor\.\w+|console|nomodeset)(?:=|$)"
)
_DOMAIN = r"(?:\.[A-Za-z0-9-]+)*"  # a name may be followed by its domain
_EDGE, _END = r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])"
# Where a user's name is none: blanks, tags, paths that doctor reads, and those that a package manager made.
_NOT_NAMES = (
    r"\[(?:home|path)\](?:/[\w./+-]*)?|"
    r"\[(?:\.\.\.|host|id|ip|mac|mail|program|serial|token|user|uuid(?: \d+)?)\]|"
    r"</?[\w:]+(?: [^<>\n]*)?>|"
    r"(?<![\w.\]])/(?:boot|dev|etc|proc|run|sys|usr/local/cuda)\b[^\s\"'<>,;()|`\\]*"
)
_SHORTEST_SECRET = 8


@dataclass(frozen=True)
class Identity:
    """What is to be blanked wherever it stands alone.

    Attributes:
        secrets: values of variables; blanked everywhere, as parts of words too.
        programs: names of programs.
    """

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

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
        secrets = {value for name, value in os.environ.items() if redact_variables.SECRET.search(name)}
        return cls(
            tuple(sorted(hosts - {""})), tuple(sorted(users - {""})),
            tuple(sorted(value for value in secrets if len(value) >= _SHORTEST_SECRET)),
        )  # fmt: skip


def redact(text: str, identity: Identity) -> str:
    """The text with blanks in square brackets, so that XML stays XML; again, it changes nothing."""
    users = {*identity.users, *redact_paths.USER.findall(text)}
    for secret in sorted(identity.secrets, key=len, reverse=True):
        text = text.replace(secret, "[...]")
    for pattern, blank in _PATTERNS:
        text = pattern.sub(blank, text)
    for names, blank, rest in (
        (identity.hosts, "[host]", _DOMAIN), (users, "[user]", ""), (identity.programs, "[program]", ""),
    ):  # fmt: skip
        text = _without_names(text, names, blank, rest)
    return text


def redact_all(parts: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """Every part, with the names of users and programs that one part gives away blanked in all.

    parts: name -> text; where the name ends in ".json" each of its strings is taken by itself, and keys stay
        unless they are paths.
    """
    everything = "\n".join(parts.values())
    programs = [_first_word(text) for text in re.findall(r"<process_name>([^<]+)", everything)]
    known = replace(
        identity,
        users=tuple(sorted({*identity.users, *redact_paths.USER.findall(everything)})),
        programs=tuple(sorted({*identity.programs, *(name for name in programs if not PROGRAMS.fullmatch(name))})),
    )
    return {name: _part(name, text, known) for name, text in parts.items()}


def _part(name: str, text: str, identity: Identity) -> str:
    if not name.endswith(".json"):
        return redact(text, identity)
    return json.dumps(_inside(json.loads(text), identity), indent=1) + "\n"


def file_text(path: str, text: str) -> str:
    """Of a file what doctor reads it for, where there is more in it; still to be redacted."""
    if path == "/proc/cmdline":
        return kernel_arguments(text)
    if path == "/proc/cpuinfo":
        return text.partition("\n\n")[0]  # of one processor: there may be hundreds
    # Somebody's process, and a container: of these the names of programs and images were not asked for.
    for end, start in (("/status", "PPid:"), ("/.containerenv", "engine=")):
        if text and path.endswith(end):
            return "\n".join(line for line in text.splitlines() if line.startswith(start)) or "[...]"
    return text


def kernel_arguments(text: str) -> str:
    """A kernel command line with the values of all words blanked that are not about what doctor looks at."""
    return " ".join(
        word if _KERNEL_WORDS.match(word) else f"{word.partition('=')[0]}=[...]" if "=" in word else word
        for word in text.split()
        if "=" in word or _KERNEL_WORDS.match(word)
    )


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment with the values of those variables that are known to be harmless; all others are blanked."""
    return redact_variables.variables(environ, lambda text: redact(text, Identity()))


def _without_names(text: str, names: Any, blank: str, rest: str) -> str:
    """Longer names first: "ann-b" before "ann"."""
    wanted = sorted((name for name in names if _is_name(name)), key=len, reverse=True)
    if not wanted:
        return text
    pattern = re.compile(f"({_NOT_NAMES})|{_EDGE}(?:{'|'.join(map(re.escape, wanted))}){rest}{_END}", re.IGNORECASE)
    return pattern.sub(lambda match: match[1] or blank, text)


def _is_name(name: str) -> bool:
    return len(name) > 1 and not name.startswith("[") and not name.isdecimal() and name.lower() not in COMMON


def _inside(value: Any, identity: Identity) -> Any:
    if isinstance(value, str):
        return redact(redact_paths.blanked(value) if value.startswith("/") and ":" not in value else value, identity)
    if isinstance(value, list):
        return [_inside(each, identity) for each in value]
    if isinstance(value, dict):
        return {
            _inside(key, identity) if key.startswith("/") else key: _inside(each, identity)
            for key, each in value.items()
        }
    return value


def _first_word(text: str) -> str:
    return (text.split() or [""])[0].rpartition("/")[2]


def _program(match: re.Match[str]) -> str:
    """Of a process its program, if it is a known one: its arguments may be anything."""
    name = _first_word(match[2])
    return match[1] + (name if PROGRAMS.fullmatch(name) else "[program]")


def _host(match: re.Match[str]) -> str:
    name = match[0].lower()
    return match[0] if any(name == domain or name.endswith(f".{domain}") for domain in DOMAINS) else "[host]"


_IPV6_START = r"(?:(?<![\w:.])|(?<=[g-z]:))"  # also behind "addr:", not inside of C++ names
_Blank = str | Callable[[re.Match[str]], str]
# Each looks a bounded way ahead: a text may have words of any length.
_TEXTS: tuple[tuple[str, _Blank], ...] = (
    (r"(<process_name>)([^<]+)", _program),
    (r"(?m:^)(\d+:[\w,=]*:)(/.*)", lambda match: match[1] + redact_paths.cgroup(match[2])),
    (
        r"(=== /sys/fs/cgroup)(/.*)?(/[\w.]+)",
        lambda match: match[1] + redact_paths.cgroup(match[2] or "") + match[3],
    ),
    *((token, "[token]") for token in TOKENS),
    (r"(\b(?:bearer|basic)\s+)(?!\[)[\w.~+/=-]{6,}", r"\1[token]"),
    (
        r"(\b(?:api[-_ ]?key|access[-_ ]?key|secret|passw(?:or)?d|passphrase|pwd|token|credentials?)[\"']?"
        r"(?:\s*[=:]\s*|(?<=key)\s+|(?<=token)\s+(?=\S*\d))[\"']?)(?![\[\s])[^\s\"',;<>]+",
        r"\1[...]",
    ),
    (r"(?<![\w\]])[^\s/:@\"'<>()\[\]]{1,64}:[^\s/@\"'<>]{1,128}@[\w.-]*(?::\d+)?", "[mail]"),
    (r"\b(?:MIG-)?(?:GPU|MIG|GI|CI)-[0-9a-f]{2,}(?:-[0-9a-f]*)*(?![\w-])(?:/\d+/\d+)?", "[uuid]"),
    (r"(?<![0-9a-f])[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}(?![0-9a-f])", "[uuid]"),  # "_": of a pod
    (r"(Device Serial Number:? )[0-9a-f]{2}(?:-[0-9a-f]{2}){7}", r"\1[serial]"),
    (r"(<(?:\w*serial\w*|module_id|host_?(?:id|name)|pdi|\w*guid|\w*uuid)>)[^<]+", r"\1[...]"),
    (r"(\bserial(?:[ _]?(?:number|no\.?|num))?\s*[:=#]\s*)(?!\[)[^\s\"'<>,;\\]+", r"\1[serial]"),
    (r"(\bhost_?name\s*[:=]\s*)(?!\[)[^\s\"'<>,;\\]+", r"\1[host]"),
    (
        r"(?<![0-9a-f:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?:[:-][0-9a-f]{2}){0,14}(?![0-9a-f-]|:[0-9a-f])",
        "[mac]",
    ),
    (r"\b(enx)[0-9a-f]{12}\b", r"\1[mac]"),
    (r"(?<![\w.])[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}(?![\w.])", "[mac]"),
    (r"(?<![0-9a-f:])[0-9a-f:]{0,40}:(?:[0-9a-f]{1,4}:)*(?<!\d)\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)", "[ip]"),
    (_IPV6_START + r"(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}(?!\w|:\w)", "[ip]"),
    # A double colon needs groups on one side, so C++ names such as torch::cuda stay; PCI addresses have none.
    (
        _IPV6_START + r"(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6})?::(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6})(?!\w|:\w)",
        "[ip]",
    ),
    (r"(?<!\d)(?<!\d\.)\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)", "[ip]"),
    # Of another host than this one: who built the kernel module stands in /proc/driver/nvidia/version.
    (r"[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)*", "[mail]"),
    (r"://(?!(?:[\w-]+\.)*(?:nvidia|pytorch|github)\.(?:com|org)(?![\w.@:-]))[^\s\"'<>\\]+", "://[...]"),
    (
        rf"(?<![\w.@/-])(?=[\d.-]*[a-z])(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:{TOP_LEVEL})(?![\w-]|\.\w)",
        _host,
    ),
    (r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])", "[id]"),
    (r"\b[a-z]:\\+[^\s\"'<>]+", "[path]"),
    (r"(?<![\w/])~(?:[a-z][\w.-]*(?:/[^\s\"'<>:,;()|`\\]*)?|/(?!\.cache\b|\[)[^\s\"'<>:,;()|`\\]+)", "[home]"),
)
_PATTERNS: tuple[tuple[re.Pattern[str], _Blank], ...] = (
    (redact_paths.QUOTED, lambda match: redact_paths.blanked(match[0])),
    *((re.compile(pattern, re.IGNORECASE), blank) for pattern, blank in _TEXTS),
    (redact_paths.PATH, lambda match: redact_paths.blanked(match[0])),
)
