"""Launches kernel.cu, on a GPU or as built for the host. No checks of arguments here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_sm120.kernels.cuda.availability import Modules
from sglang_sm120.kernels.moe.expert_schedule.config import MIN_CAPABILITY, launch_shape

if TYPE_CHECKING:
    from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule

SOURCE = Path(__file__).with_name("kernel.cu")
_modules = Modules(SOURCE, min_capability=MIN_CAPABILITY, name="expert schedule")

device_reason, ready = _modules.device_reason, _modules.ready


class _Args(ctypes.Structure):
    """ExpertScheduleArgs in kernel.cu."""

    _fields_ = (
        ("topk_ids", ctypes.c_void_p),
        ("sorted_slots", ctypes.c_void_p),
        ("block_expert", ctypes.c_void_p),
        ("expert_first_block", ctypes.c_void_p),
        ("expert_rows", ctypes.c_void_p),
        ("num_blocks", ctypes.c_void_p),
        ("block_info", ctypes.c_void_p),
        ("cleared", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("choice_stride", ctypes.c_int64),
        ("expert_offset", ctypes.c_int64),
        ("num_slots", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("num_experts", ctypes.c_int),
        ("block_rows", ctypes.c_int),
        ("counting_warps", ctypes.c_int),
        ("ids_are_int64", ctypes.c_int),
        ("capacity", ctypes.c_int),
        ("num_cleared", ctypes.c_int),
    )


def expert_schedule(topk_ids: Tensor, expert_offset: int, out: ExpertSchedule, cleared: Tensor | None) -> None:
    """See `api.expert_schedule`; writes `out` and `cleared`."""
    num_slots, num_experts = topk_ids.numel(), out.expert_rows.numel()
    shape = launch_shape(num_slots, num_experts)
    args = _Args(
        topk_ids=topk_ids.data_ptr(),
        sorted_slots=out.sorted_slots.data_ptr(),
        block_expert=out.block_expert.data_ptr(),
        expert_first_block=out.expert_first_block.data_ptr(),
        expert_rows=out.expert_rows.data_ptr(),
        num_blocks=out.num_blocks.data_ptr(),
        block_info=out.block_info.data_ptr(),
        cleared=None if cleared is None else cleared.data_ptr(),
        token_stride=topk_ids.stride(0),
        choice_stride=topk_ids.stride(1),
        expert_offset=expert_offset,
        num_slots=num_slots,
        top_k=topk_ids.shape[1],
        num_experts=num_experts,
        block_rows=out.block_rows,
        counting_warps=shape.counting_warps,
        ids_are_int64=topk_ids.dtype == torch.int64,
        capacity=out.sorted_slots.numel(),
        num_cleared=0 if cleared is None else cleared.numel(),
    )
    module = _modules.on(topk_ids.device)
    with torch.cuda.device_of(topk_ids):  # the driver launches on the current device
        module.launch("expert_schedule", 1, shape.threads, args, shared_bytes=shape.shared_bytes, programmatic=True)
