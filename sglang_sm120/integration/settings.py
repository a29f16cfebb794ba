"""What a server was started with, as a person would have to change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def in_use(view: Any, flags: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of SGLang's flags that are set: the flag, and how it was given. view: SGLang's resolved settings.

    Not set is false, nothing, "none", and a number of 0 or below.
    """
    for flag in flags:
        value = getattr(view, flag[2:].replace("-", "_"))
        if value is True:
            yield flag, flag
        elif value and value != "none" and not (isinstance(value, int | float) and value < 0):
            yield flag, f"{flag} {value}"
