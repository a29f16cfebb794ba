"""What ptxas made of a kernel: registers, spills, shared memory and SASS instructions of each kernel in a cubin.

Uses the cuobjdump that comes inside Triton's package; `available()` says whether there is one.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_USAGE = re.compile(r"^ Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\S+)\s*$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+ +)?([A-Z][\w.]*)")


@dataclass
class Facts:
    """`stack_bytes` is above 0 when registers were spilled or an array is indexed by a variable (local memory)."""

    registers: int  # a thread
    stack_bytes: int  # a thread
    local_bytes: int  # a thread
    shared_bytes: int  # static, a block; 1 KiB that the system keeps on sm_90 and later is not in it
    opcodes: Counter[str] = field(default_factory=Counter)  # with modifiers, such as "LDG.E.128.CONSTANT"

    def count(self, prefix: str) -> int:
        """How many instructions have this opcode: count("LDG") counts every LDG with its modifiers."""
        return sum(n for opcode, n in self.opcodes.items() if opcode == prefix or opcode.startswith(prefix + "."))


def _cuobjdump() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    tool = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return tool if tool.exists() else None


def available() -> bool:
    return _cuobjdump() is not None


def facts(cubin: Path | bytes) -> dict[str, Facts]:
    """Facts of every kernel, by name.

    Raises:
        RuntimeError: no cuobjdump, or it and the disassembly disagree on which kernels there are.
        subprocess.CalledProcessError: not a cubin.
    """
    tool = _cuobjdump()
    if tool is None:
        raise RuntimeError("no cuobjdump: Triton is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin if isinstance(cubin, bytes) else cubin.read_bytes())
        done = [
            subprocess.run([tool, option, path], capture_output=True, text=True) for option in ("-res-usage", "-sass")
        ]
        for run in done:
            if "Cannot decode architecture" in run.stderr:  # such as sm_121a by CUDA 12.8's, which Triton 3.6 brings
                pytest.skip(f"Triton's cuobjdump is too old: {' '.join(run.stderr.split())}")
            run.check_returncode()
        usage, sass = (run.stdout for run in done)
    found = {}
    for name, registers, stack, shared, local in _USAGE.findall(usage):
        found[name] = Facts(int(registers), int(stack), int(local), int(shared))
    disassembled = set()
    current = None
    for line in sass.splitlines():
        if match := _FUNCTION.match(line):
            disassembled.add(match[1])
            current = found[match[1]].opcodes
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current[match[1]] += 1
    if not found or disassembled != found.keys():
        raise RuntimeError(f"resource usage of {sorted(found)}, disassembly of {sorted(disassembled)}")
    return found
