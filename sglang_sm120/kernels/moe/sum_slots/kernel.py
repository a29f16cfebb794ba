"""Launches kernel.cu, on a GPU or as built for the host. No checks here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sglang_sm120.kernels.cuda.module import load

SOURCE = Path(__file__).with_name("kernel.cu")
_THREADS = 128
_KERNELS = {torch.bfloat16: "sum_slots_bf16", torch.float16: "sum_slots_f16"}


class _Args(ctypes.Structure):
    """SumSlotsArgs in kernel.cu."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("topk_ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("first_expert", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("num_tokens", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("hidden", ctypes.c_int),
        ("ids_are_int64", ctypes.c_int),
    )


def sum_slots(slots: Tensor, topk_ids: Tensor, out: Tensor, *, num_experts: int, expert_offset: int) -> None:
    """See `api.sum_slots`; ids contiguous, at least one token."""
    num_tokens, top_k = topk_ids.shape
    hidden = slots.shape[1]
    args = _Args(
        slots=slots.data_ptr(),
        topk_ids=topk_ids.data_ptr(),
        out=out.data_ptr(),
        first_expert=expert_offset,
        num_experts=num_experts,
        num_tokens=num_tokens,
        top_k=top_k,
        hidden=hidden,
        ids_are_int64=topk_ids.dtype == torch.int64,
    )
    grid = -(-num_tokens * (hidden // 8) // _THREADS)
    with torch.cuda.device_of(slots):
        load(SOURCE, slots.device).launch(_KERNELS[slots.dtype], grid, _THREADS, args, programmatic=True)
