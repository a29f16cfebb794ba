"""Which GPUs the code in a shared library is for, read from its fat binaries. Opens no CUDA, runs no tool.

A CUDA library has one section with containers in a row, and in each an entry for each architecture: machine code
(cubin) or PTX. Only the headers of the entries are read. NVIDIA does not document the layout; it was checked against
what cuobjdump lists for libraries of nvcc 13.0, and what does not look like it is left out.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAGIC = 0xBA55ED50
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, size of this header, bytes behind it, ..., architecture
_FLAGS_AT = 40
_KINDS = {1: "compute", 2: "sm"}  # PTX, machine code
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
# As nvcc 13.0 sets them for sm_120a and sm_120f; neither for sm_120.
_EXACT_FLAG, _FAMILY_FLAG = 1 << 20, 1 << 21


def read_archs(libraries: Iterable[Path], limit_s: float) -> tuple[set[str], bool]:
    """The architectures of all these libraries, such as "sm_90a" (machine code) and "compute_120" (PTX).

    Args:
        libraries: ELF files; what is none is skipped.
        limit_s: after which no further entry is read.

    Returns:
        The names, and whether everything was read in time.
    """
    deadline = time.monotonic() + limit_s
    found: set[str] = set()
    for library in libraries:
        try:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for name in _archs(data):
                    found.add(name)
                    if time.monotonic() > deadline:
                        return found, False
        except (OSError, ValueError, struct.error):  # unreadable, empty, no ELF file, cut off
            continue
    return found, True


def covers(name: str, capability: tuple[int, int]) -> bool:
    """Whether code under this name runs on a GPU: machine code, or PTX that the driver would compile.

    Machine code runs on its own major number from its minor number on; with "a" on exactly its own capability; with "f"
    on its family, which for 12.x is 12.0 and 12.1. Plain PTX runs on everything that is not older.
    """
    kind, _, number = name.partition("_")
    suffix = number[-1:] if number[-1:] in ("a", "f") else ""
    digits = number.removesuffix(suffix)
    if not digits.isdecimal() or len(digits) < 2:
        return False
    arch = (int(digits[:-1]), int(digits[-1]))
    if suffix == "a":
        return arch == capability
    if suffix == "f" or kind == "sm":
        return arch[0] == capability[0] and arch <= capability
    return arch <= capability


def _archs(data: mmap.mmap) -> Iterator[str]:
    for start, size in _sections(data):
        at, end = start, min(start + size, len(data))
        while at + _CONTAINER.size <= end:
            magic, _, header, length = _CONTAINER.unpack_from(data, at)
            if magic != _MAGIC or header < _CONTAINER.size:
                # Containers are aligned, with zeros between; what else may lie there can be large.
                at = data.find(_MAGIC_BYTES, at + 8, end)
                if at < 0:
                    break
                at += -(at - start) % 8
                continue
            yield from _entries(data, at + header, min(at + header + length, end))
            at += header + length


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[str]:
    while at + _FLAGS_AT + 8 <= end:
        kind, _, header, length, _, _, _, _, arch = _ENTRY.unpack_from(data, at)
        if header < _FLAGS_AT + 8 or kind > 255:
            return
        (flags,) = struct.unpack_from("<Q", data, at + _FLAGS_AT)
        suffix = "a" if flags & _EXACT_FLAG else "f" if flags & _FAMILY_FLAG else ""
        if kind in _KINDS:
            yield f"{_KINDS[kind]}_{arch}{suffix}"
        at += header + length


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections with device code of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if size < 64 or not count or names >= count:
        return
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    name_start, name_size = headers[names][4:6]
    if name_size > 1 << 20:
        return
    text = data[name_start : name_start + name_size]
    for name_at, _, _, _, start, length in headers:
        if text[name_at : text.find(b"\0", name_at)] in _SECTIONS:
            yield start, length
