"""Launches kernel.cu, on a GPU or as built for the host. No checks here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe.expert_schedule.api import expert_schedule
from sglang_sm120.kernels.moe.grouped_gemm_middle.config import THREADS, MiddleConfig, max_blocks
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.moe.w4a16 import (
    DTYPE_NAMES,
    ActivationArgs,
    LayerShape,
    activation_args,
    global_scale_columns,
)

SOURCE = Path(__file__).with_name("kernel.cu")


class _Args(ctypes.Structure):
    """GroupedGemmMiddleArgs in kernel.cu."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("blockscale", ctypes.c_void_p),
        ("global_scale", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("router_weights", ctypes.c_void_p),
        ("sorted_slots", ctypes.c_void_p),
        ("block_info", ctypes.c_void_p),
        ("num_blocks", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("row_major", ctypes.c_int),
        ("global_scale_stride", ctypes.c_int),
        ("first_scale", ctypes.c_int),
        ("second_scale", ctypes.c_int),
        ("gate_half", ctypes.c_int),
        ("activation", ActivationArgs),
    )


class _InterleaveArgs(ctypes.Structure):
    """InterleaveRowsArgs in kernel.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int),
        ("k", ctypes.c_int),
    )


def grouped_gemm_middle(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    router_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    expert_offset: int,
    num_global_experts: int | None,
    config: MiddleConfig,
    order: str,
) -> Tensor:
    """See `api.grouped_gemm_middle`; rows readable in 16 bytes, ids and router weights contiguous, some slots."""
    device, dtype, shape = hidden_states.device, hidden_states.dtype, LayerShape.of(weights)
    num_tokens, top_k = topk_ids.shape
    num_slots = num_tokens * top_k
    rows = max_blocks(shape, num_slots, config.block_rows) * config.block_rows
    interleaved = torch.empty(num_tokens, shape.hidden_size, dtype=dtype, device=device)
    between = torch.empty(rows, shape.intermediate_size, dtype=dtype, device=device)
    out = torch.empty(num_slots, shape.hidden_size, dtype=dtype, device=device)
    module = load(SOURCE, device)
    with torch.cuda.device_of(hidden_states):
        interleave = _InterleaveArgs(
            x=hidden_states.data_ptr(),
            out=interleaved.data_ptr(),
            row_bytes=hidden_states.stride(0) * hidden_states.element_size(),
            num_rows=num_tokens,
            k=shape.hidden_size,
        )
        grid = min(4 * config.grid1, -(-num_tokens * shape.hidden_size // 8 // THREADS))
        module.launch("interleave_rows", grid, THREADS, interleave, programmatic=True)
        schedule = expert_schedule(
            topk_ids,
            num_experts=shape.num_experts,
            block_rows=config.block_rows,
            order="row_major" if order == "row_major" else "column_major",
            expert_offset=expert_offset,
            num_global_experts=num_global_experts,
            implementation="kernel",
        )
        stride, first_scale, second_scale, gate_half = global_scale_columns(weights)
        args = _Args(
            weight=weights.w13_weight.data_ptr(),
            blockscale=weights.w13_blockscale.data_ptr(),
            global_scale=weights.w13_global_scale.data_ptr(),
            x=interleaved.data_ptr(),
            out=between.data_ptr(),
            router_weights=router_weights.data_ptr(),
            sorted_slots=schedule.sorted_slots.data_ptr(),
            block_info=schedule.block_info.data_ptr(),
            num_blocks=schedule.num_blocks.data_ptr(),
            rows=weights.w13_weight.shape[1],
            k=shape.hidden_size,
            n=shape.intermediate_size,
            top_k=top_k,
            row_major=order == "row_major",
            global_scale_stride=stride,
            first_scale=first_scale,
            second_scale=second_scale,
            gate_half=gate_half,
            activation=activation_args(activation),
        )
        suffix = DTYPE_NAMES[dtype]
        module.launch(
            config.gemm1 + suffix, config.grid1, THREADS, args, shared_bytes=config.shared_bytes, programmatic=True
        )
        args.weight = weights.w2_weight.data_ptr()
        args.blockscale = weights.w2_blockscale.data_ptr()
        args.global_scale = weights.w2_global_scale.data_ptr()
        args.x, args.out = between.data_ptr(), out.data_ptr()
        args.rows = args.n = shape.hidden_size
        args.k = shape.intermediate_size
        args.global_scale_stride, args.first_scale = 1, 0
        module.launch(
            config.gemm2 + suffix, config.grid2, THREADS, args, shared_bytes=config.shared_bytes, programmatic=True
        )
    return out
