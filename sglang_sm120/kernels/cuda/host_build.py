"""A kernel.cu on the CPU: built with g++ against host.h, loaded with ctypes. For tests; needs no torch.

Threads of a block are fibers of one CPU thread (host_fibers.h says what that finds and what not).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang_sm120.errors import ConfigError, ContractError, UnsupportedError
from sglang_sm120.kernels.cuda import build
from sglang_sm120.kernels.cuda.access_policy import AccessPolicyWindow

_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-x", "c++", "-DSM120_HOST",
    "-ffp-contract=off",  # a * b + c rounds twice here; on a GPU it may round once
    "-fno-strict-aliasing", "-fwrapv",  # what CUDA code relies on
    "-fvisibility=hidden", "-fno-gnu-unique",  # two loaded kernels must not share variables
    "-U_FORTIFY_SOURCE",  # its longjmp refuses to switch stacks
)  # fmt: skip


class HostModule:
    """The kernels of one source, runnable on the CPU; `launch` as in KernelModule, and synchronous."""

    def __init__(self, library: Path, source: Path) -> None:
        self.source = source
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: ctypes.Structure,
        *,
        shared_bytes: int = 0,
        stream: int | None = None,
        programmatic: bool = False,
        window: AccessPolicyWindow | None = None,
    ) -> None:
        """Run a kernel to its end, block after block. `stream`, `programmatic` and `window` change nothing here.

        Raises:
            ContractError: no such kernel; `args` not of the size of the kernel's struct; a grid or block out of range;
                or a fault while running: a deadlock, an mma by part of a warp, a write past dynamic shared memory.
        """
        try:
            run, args_bytes = self._library[f"launch_{name}"], self._library[f"args_bytes_{name}"]()
        except AttributeError:
            raise ContractError(
                f"{self.source} exports no kernel {name}", "a kernel's name", f"write SM120_HOST_EXPORT({name}, ARGS)"
            ) from None
        check_launch(name, grid, block, shared_bytes)
        check_args_size(name, args, args_bytes)
        run.restype = ctypes.c_char_p
        fault = run(grid, block, shared_bytes, ctypes.byref(args))
        if fault is not None:
            raise ContractError(
                f"{name} on the CPU, {fault.decode()}", "a kernel without this fault", "correct the kernel"
            )


def check_launch(name: str, grid: int, block: int, shared_bytes: int) -> None:
    """Raises ContractError for sizes that no device takes."""
    if not (1 <= grid < 2**31 and 1 <= block <= 1024 and shared_bytes >= 0):
        raise ContractError(
            f"{name} launched with grid {grid}, block {block}, shared_bytes {shared_bytes}",
            "grid 1 to 2^31 - 1 blocks, block 1 to 1024 threads, shared_bytes 0 or more",
            "return before launching when there is nothing to do",
        )


def check_args_size(name: str, args: ctypes.Structure, needed: int) -> None:
    """Raises ContractError when the ctypes mirror cannot be the kernel's struct."""
    if ctypes.sizeof(args) != needed:
        raise ContractError(
            f"{name} was given {type(args).__name__} of {ctypes.sizeof(args)} bytes",
            f"the {needed} bytes of the kernel's struct",
            "give the ctypes.Structure the same fields, in the same order, as the C++ struct",
        )


def load(source: Path, defines: tuple[str, ...] = ()) -> HostModule:
    """Build a source for the CPU, or take it from the cache.

    Raises:
        UnsupportedError: no C++ compiler.
        ConfigError: the source does not compile; the message holds the compiler's words.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UnsupportedError(
            "there is no C++ compiler to run CUDA kernels on the CPU with", "g++ 9 or newer", "apt-get install g++"
        )
    extra = list(build.headers(source, "*.h").values())
    key = [build.source_hash(source, extra), compiler, *_FLAGS, *defines]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    library = build.cache_dir() / f"{build.op_name(source)}-host-{digest}.so"
    if not library.exists():
        _compile(compiler, source, defines, library)
    try:
        return HostModule(library, source)
    except OSError:  # damaged, or built on another machine
        _compile(compiler, source, defines, library)
        return HostModule(library, source)


def _compile(compiler: str, source: Path, defines: tuple[str, ...], library: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / library.name
        command = [compiler, *_FLAGS, *(f"-D{name}" for name in defines)]
        command += [f"-I{build.SHARED_HEADERS}", "-o", str(output), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ConfigError(
                f"{source} does not compile for the CPU:\n{done.stderr}",
                "a source that follows host.h",
                "read the rules at the top of kernels/cuda/host.h",
            )
        build.write_atomic(library, output.read_bytes())
