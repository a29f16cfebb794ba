"""The files of a recorded machine, read back: people send these folders around, and edit them.

Every error is an OSError, or a ValueError whose text names the file and what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STATES = ("ok", "missing", "failed", "hung", "skipped")


def read_rest(folder: Path) -> dict[str, Any]:
    """machine.json: what is neither a command's text nor a file's. Only "environ" has to be there.

    Raises:
        OSError: no file, or one that cannot be read.
        ValueError: it is not JSON, or not of this form.
    """
    text = _text(folder / "machine.json")
    try:
        rest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"machine.json is no JSON: {error}") from error
    if not isinstance(rest, dict):
        raise ValueError("machine.json holds no object")
    if "environ" not in rest:
        raise ValueError("machine.json has no 'environ'")
    for name, fits in _PARTS.items():
        if name in rest and not fits(rest[name]):
            raise ValueError(f"machine.json: '{name}' is not of the form that --record writes")
    for name, fits in _PYTHON.items():
        if name in rest.get("python", {}) and not fits(rest["python"][name]):
            raise ValueError(f"machine.json: 'python', '{name}' is not of the form that --record writes")
    if "hook_problems" in rest.get("python", {}) and "sglang_tree" not in rest["python"]:
        raise ValueError("machine.json: 'python' has 'hook_problems' and no 'sglang_tree'")
    return rest


def read_files(folder: Path) -> dict[str, str]:
    """files.txt: path -> text, each under a line "=== PATH".

    Raises:
        OSError: no file, or one that cannot be read.
        ValueError: it does not begin with such a line.
    """
    files: dict[str, str] = {}
    path = ""
    for line in _text(folder / "files.txt").removesuffix("\n").split("\n"):  # splitlines also cuts at form feeds
        if line.startswith("=== "):
            path = line[4:]
            files[path] = ""
        elif path:
            files[path] += line + "\n"
        elif line.strip():
            raise ValueError(f"files.txt begins with {line[:40]!r}, not with '=== PATH'")
    return files


def read_texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """What commands wrote: name -> text; those that wrote nothing have no file.

    Raises:
        OSError: a file that cannot be read.
    """
    return {name: _text(folder / f"{name}.txt") for name in names if (folder / f"{name}.txt").exists()}


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")  # line ends as they are


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(fits: Callable[[Any], bool], length: int | None = None) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value)) and length in (None, len(value))


def _table_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _is_state(value: Any) -> bool:
    """State and exit status; a later version may add to it."""
    return isinstance(value, list) and len(value) >= 2 and value[0] in STATES and _is_number(value[1])


def _is_profile(value: Any) -> bool:
    return _table_of(_is_text)(value) and {"kind", "path", "state", "detail"} <= value.keys()


def _is_cache(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_is_text(value.get(name)) for name in ("version", "archs"))
        and _is_number(value.get("operations"))
        and _list_of(_is_text)(value.get("cuda_homes"))
    )


_PARTS: dict[str, Callable[[Any], bool]] = {
    "environ": _table_of(_is_text),
    "states": _table_of(_is_state),
    "folders": _table_of(_list_of(_is_text)),
    "links": _table_of(_is_text),
    "spaces": _table_of(lambda space: space is None or _list_of(_is_number, 2)(space)),
    "acs": _table_of(lambda control: _is_number(control) and 0 <= control < 1 << 16),
    "python": lambda value: isinstance(value, dict),
    "profiles": _list_of(_is_profile),
}
_PYTHON: dict[str, Callable[[Any], bool]] = {
    "version": _is_text,
    "packages": _table_of(lambda versions: _list_of(_is_text)(versions) and bool(versions)),
    "entry_points": _list_of(_is_text),
    "pins": _table_of(_is_text),
    "b12x_owners": _list_of(_is_text),
    "unreadable": _table_of(_is_text),
    "places": _table_of(_list_of(_is_text)),
    "sglang_tree": _is_text,
    "hook_problems": _list_of(_list_of(_is_text, 3)),
    "archs": _table_of(_list_of(_is_text)),
    "tools": _table_of(_is_text),
    "jit_cache": _list_of(_is_cache),
}
"""Of `facts_python.gather`, what a check relies on."""
