"""How nvidia-smi writes: its XML, whole or cut off, its tables, and what it says beside them when a GPU is in trouble.

It ends at the first GPU that it cannot reach, or says so between others, or writes "[GPU requires reset]" into each
field; which of them depends on its version and on what was asked. So all of its text is looked at, whatever its status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

_START, _END = "<nvidia_smi_log", "</nvidia_smi_log>"
_NOTHING = {
    "", "n/a", "none", "not supported", "unknown error", "unknown", "err!", "not found", "insufficient permissions",
    "requested functionality has been deprecated", "gpu is lost", "gpu requires reset", "no permission",
}  # fmt: skip
"""What stands in a field that has no value; in brackets or without."""

_PLACE = re.compile(r"\b(?:GPU)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b", re.IGNORECASE)
_NO_HANDLE = re.compile(r"unable to determine the device handle for|gpu is lost|fallen off the bus", re.IGNORECASE)

_UNUSABLE = ("gpu is lost", "gpu requires reset")
"""What the driver writes into every field of a GPU that it cannot use any more."""

_CORE = ("fb_memory_usage/total", "utilization/gpu_util", "temperature/gpu_temp")
"""Fields that every card has: an error in one is a fault. Fans and power may show errors on cards that work."""


@dataclass(frozen=True)
class Document:
    """What `nvidia-smi -q -x` printed.

    Attributes:
        root: of the XML; None where there is none that can be read.
        whole: it was not cut off; GPUs behind the cut are missing.
        error: why it cannot be read.
    """

    root: ElementTree.Element | None
    whole: bool = True
    error: str = ""


def document(text: str) -> Document:
    """The XML in a text with other lines around it; of one that is cut off, the GPUs that are whole."""
    start = text.find(_START)
    if start < 0:
        return Document(None, error="it printed no XML")
    end = text.find(_END, start)
    if end < 0:
        last = text.rfind("</gpu>")
        if last < start:
            return Document(None, whole=False, error="its XML ends before the first GPU")
        inside = text[start : last + len("</gpu>")] + _END
    else:
        inside = text[start : end + len(_END)]
    inside = inside.encode(errors="replace").decode()
    # Control characters in names, and names of processes that were not escaped, are no XML.
    inside = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "", inside)
    inside = re.sub(
        r"(<process_name>)(.*?)(</process_name>)",
        lambda m: m[1] + _escaped(m[2]).replace("<", "&lt;") + m[3], inside, flags=re.DOTALL,
    )  # fmt: skip
    try:
        return Document(ElementTree.fromstring(_escaped(inside)), whole=end >= 0)
    except ElementTree.ParseError as error:
        return Document(None, error=f"its XML cannot be read ({error})")


def _escaped(text: str) -> str:
    return re.sub(r"&(?!(?:\w+|#\d+|#x[0-9a-fA-F]+);)", "&amp;", text)


def lost(texts: Iterable[str]) -> dict[str, str]:
    """GPUs that it could not reach: PCI bus id as /sys has it, or "GPU 1" where it says no more -> its words."""
    found: dict[str, str] = {}
    for line in (line.strip() for text in texts for line in text.splitlines()):
        if line.startswith("<") or not _NO_HANDLE.search(line):  # a field: of a GPU that it reached
            continue
        place, number = _PLACE.search(line), re.search(r"\bGPU ?(\d{1,3})\b(?!:\w\w)", line, re.IGNORECASE)
        where = bus_id(place[1]) if place else f"GPU {number[1]}" if number else ""
        if where:
            found.setdefault(where, line[:300])
    return found


def corrupted_inforoms(texts: Iterable[str]) -> tuple[str, ...]:
    """PCI bus ids in its warnings of a damaged infoROM, each once."""
    lines = [line for text in texts for line in text.splitlines() if "inforom is corrupted" in line.lower()]
    return tuple(dict.fromkeys(bus_id(place[1]) for line in lines if (place := _PLACE.search(line))))


def bus_id(text: str) -> str:
    """nvidia-smi's "00000000:C1:00.0" as /sys writes it."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def raw(element: ElementTree.Element, path: str) -> str:
    """A field's text as it stands there, without the brackets around a missing value."""
    return (element.findtext(path) or "").strip().removeprefix("[").removesuffix("]")


def field(element: ElementTree.Element, path: str) -> str:
    """A field's text; empty where the driver has none."""
    text = raw(element, path)
    return "" if text.lower() in _NOTHING else text


def any_yes(element: ElementTree.Element, *paths: str) -> bool:
    """Whether one of these fields says so; older drivers have not all of them."""
    return any(field(element, path) == "Yes" for path in paths)


def number(text: str) -> int | None:
    """The first whole number of "16x", "97887 MiB", "600.00 W"."""
    match = re.match(r"\s*(\d+)", text)
    return int(match[1]) if match else None


def watts(text: str) -> float | None:
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*W", text)
    return float(match[1]) if match else None


def fault(element: ElementTree.Element) -> str:
    """What stands in place of values of a GPU that cannot be used; empty for one that can."""
    for node in element.iter():
        text = (node.text or "").strip().strip("[]")
        if text.lower() in _UNUSABLE:
            return text
    return next((text for path in _CORE if (text := raw(element, path)).lower() in ("unknown error", "err!")), "")


def recovery(element: ElementTree.Element) -> str:
    """What the driver wants done; empty for nothing. Drivers before 565 have two flags in its place."""
    if action := field(element, "gpu_recovery_action"):
        return action
    if field(element, "gpu_reset_status/reset_required") == "Yes":
        return "Reset"
    return "Drain and Reset" if field(element, "gpu_reset_status/drain_and_reset_recommended") == "Yes" else ""


def slowed(element: ElementTree.Element) -> list[str]:
    """What lowers the clocks now; a power cap and rest are ordinary, these are not."""
    bad = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
    found = []
    for table in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for node in element.iterfind(f"{table}/*"):
            name = re.sub(r"^clocks_(event|throttle)_reason_", "", node.tag)
            if name in bad and (node.text or "").strip() == "Active":
                found.append(name)
    return found


def capabilities(text: str) -> dict[str, tuple[int, int]]:
    """From lines such as "00000000:01:00.0, 12.0"; others are passed over."""
    found = {}
    for line in text.splitlines():
        place, _, version = line.partition(",")
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", version)
        if match and _PLACE.fullmatch(place.strip()):
            found[bus_id(place)] = (int(match[1]), int(match[2]))
    return found


def matrix(text: str) -> tuple[tuple[int, int, str], ...]:
    """The cells between GPUs of a `nvidia-smi topo` table, each pair once.

    Columns are separated by tabs. Terminals get an underlined header; a pipe may get those codes too.
    """
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    header = next((line for line in lines if re.match(r"\s*GPU0\b", line)), "")
    columns = [column.strip() for column in header.split("\t")]
    cells = []
    for line in lines:
        row = [cell.strip() for cell in line.split("\t")]
        match = re.fullmatch(r"GPU(\d+)", row[0])
        if line == header or match is None:
            continue
        for column, cell in zip(columns, row, strict=False):
            other = re.fullmatch(r"GPU(\d+)", column)
            if other and int(other[1]) > int(match[1]) and cell:
                cells.append((int(match[1]), int(other[1]), cell))
    return tuple(cells)
