"""What a check is: a small function from the facts to findings, and its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sglang_sm120.doctor.facts import Facts
from sglang_sm120.findings import Finding


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: stays the same from version to version, "bus.acs".
        find: pure; what it cannot know of the facts it does not speak of.
        quick: its facts are there without starting a process, so the launcher runs it too.
    """

    name: str
    find: Callable[[Facts], Iterable[Finding]]
    quick: bool = False

    def run(self, facts: Facts) -> list[Finding]:
        """Its findings under its name. One that fails itself says so, and does not stop the others."""
        try:
            return [replace(finding, check=self.name) for finding in self.find(facts)]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            return [
                Finding("warn", f"check {self.name}", f"it failed: {found}", fix="please report it", check=self.name)
            ]


def version_numbers(version: str) -> tuple[int, ...]:
    """(13, 0) of "13.0.88"; empty where it is no version."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if version and all(part.isdecimal() for part in parts) else ()


def listed(numbers: Iterable[object], most: int = 8) -> str:
    """ "0, 1, 2", and how many more there are."""
    words = [str(number) for number in numbers]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
