"""Launches kernel.cu, on a GPU or as built for the host. No checks here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe.expert_schedule.api import expert_schedule
from sglang_sm120.kernels.moe.grouped_gemm_decode.config import (
    BLOCK_ROWS,
    DecodeConfig,
    Launch,
    max_blocks,
    partial_floats,
)
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
    """GroupedGemmDecodeArgs in kernel.cu."""

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
        ("partial", ctypes.c_void_p),
        ("partial_ready", ctypes.c_void_p),
        ("x_row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("row_major", ctypes.c_int),
        ("num_slots", ctypes.c_int),
        ("topk_ids", ctypes.c_void_p),
        ("first_expert", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("ids_are_int64", ctypes.c_int),
        ("global_scale_stride", ctypes.c_int),
        ("first_scale", ctypes.c_int),
        ("second_scale", ctypes.c_int),
        ("gate_half", ctypes.c_int),
        ("activation", ActivationArgs),
    )


def grouped_gemm_decode(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    router_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    expert_offset: int,
    num_global_experts: int | None,
    config: DecodeConfig,
    order: str,
) -> Tensor:
    """See `api.grouped_gemm_decode`; rows readable in 16 bytes, ids and router weights contiguous, some slots."""
    device, shape = hidden_states.device, LayerShape.of(weights)
    num_slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    blocks = max_blocks(shape, num_slots)
    between = torch.empty(blocks * BLOCK_ROWS, shape.intermediate_size, dtype=hidden_states.dtype, device=device)
    out = torch.empty(num_slots, shape.hidden_size, dtype=hidden_states.dtype, device=device)
    stride, first_scale, second_scale, gate_half = global_scale_columns(weights)
    args = _Args(
        top_k=top_k,
        row_major=order == "row_major",
        num_slots=num_slots,
        topk_ids=topk_ids.data_ptr(),
        first_expert=expert_offset,
        num_experts=shape.num_experts,
        ids_are_int64=topk_ids.dtype == torch.int64,
        router_weights=router_weights.data_ptr(),
    )
    partial = flags = schedule = None
    if not config.tiny:
        partial = torch.empty(partial_floats(shape, config.gemm1), dtype=torch.float32, device=device)
        flags = torch.empty(config.gemm1.grid, dtype=torch.int32, device=device)
        schedule = expert_schedule(
            topk_ids,
            num_experts=shape.num_experts,
            block_rows=BLOCK_ROWS,
            order="row_major" if order == "row_major" else "column_major",
            expert_offset=expert_offset,
            num_global_experts=num_global_experts,
            cleared=flags,
            implementation="kernel",
        )
        args.sorted_slots = schedule.sorted_slots.data_ptr()
        args.block_info = schedule.block_info.data_ptr()
        args.num_blocks = schedule.num_blocks.data_ptr()
        args.partial = partial.data_ptr()
        args.partial_ready = flags.data_ptr()

    args.weight = weights.w13_weight.data_ptr()
    args.blockscale = weights.w13_blockscale.data_ptr()
    args.global_scale = weights.w13_global_scale.data_ptr()
    args.x = hidden_states.data_ptr()
    args.x_row_bytes = hidden_states.stride(0) * hidden_states.element_size()
    args.out = between.data_ptr()
    args.rows = weights.w13_weight.shape[1]
    args.k, args.n = shape.hidden_size, shape.intermediate_size
    args.global_scale_stride, args.first_scale, args.second_scale = stride, first_scale, second_scale
    args.gate_half = gate_half
    args.activation = activation_args(activation)
    _launch(config.gemm1, args, hidden_states)

    args.weight = weights.w2_weight.data_ptr()
    args.blockscale = weights.w2_blockscale.data_ptr()
    args.global_scale = weights.w2_global_scale.data_ptr()
    args.x = between.data_ptr()
    args.x_row_bytes = between.stride(0) * between.element_size()
    args.out = out.data_ptr()
    args.rows = args.n = shape.hidden_size
    args.k = shape.intermediate_size
    args.global_scale_stride, args.first_scale = 1, 0
    _launch(config.gemm2, args, hidden_states)
    return out


def _launch(launch: Launch, args: _Args, hidden_states: Tensor) -> None:
    with torch.cuda.device_of(hidden_states):
        load(SOURCE, hidden_states.device).launch(
            launch.kernel + DTYPE_NAMES[hidden_states.dtype],
            launch.grid,
            launch.block,
            args,
            shared_bytes=launch.shared_bytes,
            programmatic=True,
        )
