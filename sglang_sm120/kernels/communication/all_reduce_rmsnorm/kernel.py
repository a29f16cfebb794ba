"""Launches kernel.cu, on a GPU or as built for the host. No checks here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import Shape, Space
from sglang_sm120.kernels.communication.window import Window
from sglang_sm120.kernels.cuda.module import HostModule, KernelModule, load

SOURCE = Path(__file__).with_name("kernel.cu")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
FAULT, LIMIT_MS, PEER, BLOCK, PHASE, EPOCH = range(6)  # StatusWord in kernel.cu


class _Args(ctypes.Structure):
    """AllReduceArgs in kernel.cu."""

    _fields_ = (
        ("windows", ctypes.c_uint64 * config.MAX_WORLD),
        ("input", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("residual_out", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("elements", ctypes.c_int64),
        ("inbox_bytes", ctypes.c_int64),
        ("gather_bytes", ctypes.c_int64),
        ("lamport_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("gamma_offset", ctypes.c_float),
    )


def module(window: Window) -> KernelModule | HostModule:
    """The kernels for a rank; on the CPU a build of its own for each, since a build runs one launch at a time."""
    return load(SOURCE, window.device, () if window.device.type == "cuda" else (f"SM120_RANK={window.rank}",))


def run(
    window: Window,
    space: Space,
    algorithm: str,
    shape: Shape,
    x: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float, float] | None = None,
) -> None:
    """space: of the window. norm: residual, residual_out, gamma, eps, gamma_offset."""
    args = _Args(
        input=x.data_ptr(),
        out=out.data_ptr(),
        status=window.status_address,
        elements=shape.elements,
        inbox_bytes=space.inbox,
        gather_bytes=space.gather,
        lamport_bytes=space.lamport,
        rows=shape.rows,
        width=shape.width,
        rank=window.rank,
    )
    args.windows[: window.world_size] = window.addresses
    if norm is not None:
        residual, residual_out, gamma, args.eps, args.gamma_offset = norm
        args.residual, args.residual_out, args.gamma = residual.data_ptr(), residual_out.data_ptr(), gamma.data_ptr()
    variant = f"{DTYPES[x.dtype]}_w{window.world_size}_v{config.vectors_per_thread(shape.width)}"
    name = f"{algorithm.replace('-', '_')}_{variant}"
    module(window).launch(name, config.grid(shape.rows), config.threads(shape.width), args, programmatic=True)
