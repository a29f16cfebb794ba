"""One thing to know about a machine or an installation: how `doctor`, the P2P probe and the launcher say it.

Standard library only, like errors.py: whoever finds something out may say it in this form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("fail", "warn", "note", "ok")
"""Worst first."""


@dataclass(frozen=True)
class Finding:
    """One result, with an error's three parts.

    Attributes:
        level: "ok"; "note" (good to know); "warn" (it works, but slower than it could, or a part of this package will
            not be used); "fail" (what was asked for will be refused, or will hang or be wrong).
        what: it is about, in a few words for people.
        found: what there is.
        needed: what there should be; may be empty where `fix` says it.
        fix: what to do, a line for each step, the likeliest first; may be empty.
        check: which check says it, a name that stays the same, such as "bus.acs"; for scripts.
    """

    level: str
    what: str
    found: str
    needed: str = ""
    fix: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is none of {', '.join(LEVELS)}")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By level; within a level in the order in which they were found."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def failed(findings: Iterable[Finding]) -> bool:
    """Whether one of them says "fail"."""
    return any(finding.level == "fail" for finding in findings)
