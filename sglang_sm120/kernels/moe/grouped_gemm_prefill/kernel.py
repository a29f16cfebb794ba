"""The grouped GEMM as a persistent Triton kernel. One source, three places it runs:

- compute capability 12.x, NATIVE: `tl.dot_scaled` becomes `mma.sync.m16n8k64 kind::mxf4nvf4.block_scale.scale_vec::4X`;
- elsewhere, not NATIVE: both operands are decoded to fp16, exactly, and multiplied by `tl.dot`. Triton 3.6 cannot lower
  the first form off 12.x, and the interpreter reads e4m3 scales as e8m0;
- the CPU, with TRITON_INTERPRET=1, not NATIVE.

N and K are constexpr, because only then does the compiler know how a row of K/16 scales is aligned: with K at run time
scales are loaded byte by byte, and large tiles spill. Off the tile, loads are masked in every step of K; a K that
BLOCK_K divides pays nothing for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule
    from sglang_sm120.kernels.moe.grouped_gemm_prefill.config import GemmConfig
    from sglang_sm120.kernels.moe.layer import MoeActivation

# One e2m1 is decoded as value * 2**-14 (fp16) or 2**-126 (bf16), its bits being placed where exponent and mantissa
# meet; the scale is multiplied by the rest, so that every decoded operand is its value times 2**-7.
_DECODED = tl.constexpr(128.0)
_BF16_SCALE = tl.constexpr(2.0**119)


@triton.jit
def _decode_nvfp4(codes, scales, COMPUTE: tl.constexpr):
    """uint8 [R, C/2] (even element in the low nibble) and e4m3 [R, C/16] -> e2m1 * e4m3 * 2**-7, COMPUTE [R, C].

    Exact in fp16, bf16 and fp32: the product has at most six significant bits and stays above 2**-17.
    """
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1] * 2
    x = codes.to(tl.uint16)
    if COMPUTE is tl.bfloat16:
        low = ((x & 0x08) << 12) | ((x & 0x07) << 6)
        high = ((x & 0x80) << 8) | ((x & 0x70) << 2)
        value = tl.reshape(tl.join(low, high), (R, C // 16, 16)).to(tl.bfloat16, bitcast=True)
        scale = (scales.to(tl.float32) * _BF16_SCALE).to(tl.bfloat16)
    else:
        low = ((x & 0x08) << 12) | ((x & 0x07) << 9)
        high = ((x & 0x80) << 8) | ((x & 0x70) << 5)
        value = tl.reshape(tl.join(low, high), (R, C // 16, 16)).to(tl.float16, bitcast=True)
        scale = scales.to(tl.float16) * _DECODED
    return tl.reshape(value * scale[:, :, None], (R, C)).to(COMPUTE)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    # Comparisons with `where`, here and below: minimum and maximum drop a NaN, and torch's clamp keeps it.
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    return x


@triton.jit
def _activate_gated(
    gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SWIGLU_ALPHA: tl.constexpr, SWIGLU_BETA: tl.constexpr
):
    if LIMIT is None:
        return _activate(gate, ACTIVATION) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * tl.sigmoid(SWIGLU_ALPHA * gate) * (up + SWIGLU_BETA)


@triton.jit
def tile_of(
    t,
    block_expert_ptr,
    expert_first_block_ptr,
    expert_rows_ptr,
    NT: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Tile t's expert, that expert's first block and rows, and its row block and column in the expert.

    An expert owns as many numbers in a row as it has tiles. Column-major: all row blocks of a weight column come before
    the next column, so that the column is fetched from memory once and found in L2 by the others.
    """
    expert = tl.load(block_expert_ptr + t // NT)
    first_block = tl.load(expert_first_block_ptr + expert)
    rows = tl.load(expert_rows_ptr + expert)
    local = t - first_block * NT
    if COLUMN_MAJOR:
        blocks = (rows + BLOCK_M - 1) // BLOCK_M
        m = local % blocks
        n = local // blocks
    else:
        m = local // NT
        n = local % NT
    return expert, first_block, rows, m, n


@triton.jit
def _tile(
    t,
    a_ptr,
    a_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    alpha_ptr,
    out_ptr,
    sorted_slots_ptr,
    block_expert_ptr,
    expert_first_block_ptr,
    expert_rows_ptr,
    router_weight_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_DIV: tl.constexpr,
    A_SORTED: tl.constexpr,
    OUT_SORTED: tl.constexpr,
    TWO_ALPHAS: tl.constexpr,
    GATED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SWIGLU_ALPHA: tl.constexpr,
    SWIGLU_BETA: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute and store output tile t."""
    NT: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    HALF: tl.constexpr = N // 2
    OUT_N: tl.constexpr = HALF if GATED else N
    W4A4: tl.constexpr = a_scale_ptr is not None
    STEP_BYTES: tl.constexpr = BLOCK_K // 2
    STEP_SCALES: tl.constexpr = BLOCK_K // 16
    K_SCALES: tl.constexpr = K // 16
    TILE_COLS: tl.constexpr = (K_SCALES + 3) // 4  # 128x4 tiles along K in the swizzled scales
    EXPERT_SCALES: tl.constexpr = (N + 127) // 128 * TILE_COLS * 512

    expert, first_block, rows, m, n = tile_of(
        t, block_expert_ptr, expert_first_block_ptr, expert_rows_ptr, NT, COLUMN_MAJOR, BLOCK_M
    )
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = row < rows
    # A row beyond the expert's count reads a row that exists, so that nothing depends on what the padding holds.
    position = first_block * BLOCK_M + tl.where(row_ok, row, 0)
    slot = tl.load(sorted_slots_ptr + position)
    a_row = (position if A_SORTED else slot // A_DIV).to(tl.int64)

    # A gated tile takes column j of both halves side by side, so that one thread holds the pair.
    j = tl.arange(0, BLOCK_N)
    if GATED:
        column = n * (BLOCK_N // 2) + j // 2
        w_row = (j % 2) * HALF + (column if HALF % (BLOCK_N // 2) == 0 else column % HALF)
    else:
        column = n * BLOCK_N + j
        w_row = column if N % BLOCK_N == 0 else column % N

    # Offsets inside an expert fit in int32 (checked); the experts and the rows of A together may not.
    expert64 = expert.to(tl.int64)
    k_byte = tl.arange(0, STEP_BYTES)
    k_scale = tl.arange(0, STEP_SCALES)
    w_ptrs = weight_ptr + expert64 * (N * (K // 2)) + (w_row[:, None] * (K // 2) + k_byte[None, :])
    ws_row = (w_row // 128) * (TILE_COLS * 512) + (w_row % 32) * 16 + (w_row // 32) % 4 * 4
    ws_column = (k_scale // 4) * 512 + k_scale % 4
    ws_ptrs = weight_scale_ptr + expert64 * EXPERT_SCALES + (ws_row[:, None] + ws_column[None, :])
    if W4A4:
        a_ptrs = a_ptr + a_row[:, None] * (K // 2) + k_byte[None, :]
        as_ptrs = a_scale_ptr + a_row[:, None] * K_SCALES + k_scale[None, :]
    else:
        k_element = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + a_row[:, None] * K + k_element[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(w_ptrs)
            ws = tl.load(ws_ptrs)
            a = tl.load(a_ptrs)
        else:
            byte_ok = (k_byte < K // 2 - step * STEP_BYTES)[None, :]
            scale_ok = (k_scale < K_SCALES - step * STEP_SCALES)[None, :]
            w = tl.load(w_ptrs, mask=byte_ok, other=0)
            # The last tile of scales is there up to its fourth column: load it whole, drop its padding afterwards.
            ws = tl.load(ws_ptrs, mask=(k_scale < TILE_COLS * 4 - step * STEP_SCALES)[None, :], other=0)
            if K % 64 != 0:
                ws = tl.where(scale_ok, ws, 0)
            if W4A4:
                a = tl.load(a_ptrs, mask=byte_ok, other=0)
            else:
                a = tl.load(a_ptrs, mask=(k_element < K - step * BLOCK_K)[None, :], other=0.0)
        ws = ws.to(tl.float8e4nv, bitcast=True)
        if W4A4:
            if EVEN_K:
                a_scale = tl.load(as_ptrs)
            else:
                a_scale = tl.load(as_ptrs, mask=scale_ok, other=0)
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            if NATIVE:
                acc = tl.dot_scaled(a, a_scale, "e2m1", w.trans(), ws, "e2m1", acc)
            else:
                acc = tl.dot(_decode_nvfp4(a, a_scale, tl.float16), _decode_nvfp4(w, ws, tl.float16).trans(), acc)
            as_ptrs += STEP_SCALES
        else:
            acc = tl.dot(a, _decode_nvfp4(w, ws, a.dtype).trans(), acc)
        a_ptrs += STEP_BYTES if W4A4 else BLOCK_K
        w_ptrs += STEP_BYTES
        ws_ptrs += STEP_SCALES * 128

    DECODED: tl.constexpr = (1.0 if NATIVE else _DECODED * _DECODED) if W4A4 else _DECODED
    if TWO_ALPHAS:
        alpha_first = tl.load(alpha_ptr + expert * 2) * DECODED
        alpha_second = tl.load(alpha_ptr + expert * 2 + 1) * DECODED
    else:
        alpha_first = tl.load(alpha_ptr + expert) * DECODED
        alpha_second = alpha_first
    if GATED:
        first, second = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        first *= alpha_first
        second *= alpha_second
        if UP_FIRST:
            result = _activate_gated(second, first, ACTIVATION, LIMIT, SWIGLU_ALPHA, SWIGLU_BETA)
        else:
            result = _activate_gated(first, second, ACTIVATION, LIMIT, SWIGLU_ALPHA, SWIGLU_BETA)
        out_column = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        out_column = column
        if TWO_ALPHAS:
            result = acc * tl.where(out_column < HALF, alpha_first, alpha_second)[None, :]
        else:
            result = acc * alpha_first
        result = _activate(result, ACTIVATION)
    if router_weight_ptr is not None:
        result *= tl.load(router_weight_ptr + slot)[:, None]
    out_row = (position if OUT_SORTED else slot).to(tl.int64)
    tl.store(
        out_ptr + out_row[:, None] * OUT_N + out_column[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (out_column < OUT_N)[None, :],
    )


# How these happen to be aligned must not make another kernel: they may be pieces of one allocation, which move with the
# number of tokens. The other pointers are allocations of their own.
@triton.jit(
    do_not_specialize_on_alignment=[
        "alpha_ptr", "sorted_slots_ptr", "block_expert_ptr", "expert_first_block_ptr", "expert_rows_ptr",
        "num_blocks_ptr", "router_weight_ptr", "ticket_ptr",
    ]
)  # fmt: skip
def grouped_gemm(
    a_ptr,  # uint8 [R, K/2] with a_scale_ptr, else bf16 or fp16 [R, K] (or fp32, in the interpreter)
    a_scale_ptr,  # the bytes of e4m3 [R, K/16], or None
    weight_ptr,  # uint8 [E, N, K/2]
    weight_scale_ptr,  # the bytes of e4m3 [E, pad128(N), pad4(K/16)], 128x4 swizzled
    alpha_ptr,  # f32 [E] or [E, 2]
    out_ptr,  # [rows, OUT_N]
    sorted_slots_ptr,
    block_expert_ptr,
    expert_first_block_ptr,
    expert_rows_ptr,
    num_blocks_ptr,
    router_weight_ptr,  # f32 [slots], or None
    ticket_ptr,  # int32 [2], zero between launches, or None: tiles are handed out statically
    N: tl.constexpr,
    K: tl.constexpr,
    A_DIV: tl.constexpr,
    A_SORTED: tl.constexpr,
    OUT_SORTED: tl.constexpr,
    TWO_ALPHAS: tl.constexpr,
    GATED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SWIGLU_ALPHA: tl.constexpr,
    SWIGLU_BETA: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    NT: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    programs = tl.num_programs(0)
    total = tl.load(num_blocks_ptr) * NT
    if ticket_ptr is None:
        for t in range(tl.program_id(0), total, programs):
            _tile(
                t, a_ptr, a_scale_ptr, weight_ptr, weight_scale_ptr, alpha_ptr, out_ptr, sorted_slots_ptr,
                block_expert_ptr, expert_first_block_ptr, expert_rows_ptr, router_weight_ptr, N, K, A_DIV, A_SORTED,
                OUT_SORTED, TWO_ALPHAS, GATED, UP_FIRST, ACTIVATION, LIMIT, SWIGLU_ALPHA, SWIGLU_BETA, COLUMN_MAJOR,
                NATIVE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    else:
        t = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        while t < total:
            _tile(
                t, a_ptr, a_scale_ptr, weight_ptr, weight_scale_ptr, alpha_ptr, out_ptr, sorted_slots_ptr,
                block_expert_ptr, expert_first_block_ptr, expert_rows_ptr, router_weight_ptr, N, K, A_DIV, A_SORTED,
                OUT_SORTED, TWO_ALPHAS, GATED, UP_FIRST, ACTIVATION, LIMIT, SWIGLU_ALPHA, SWIGLU_BETA, COLUMN_MAJOR,
                NATIVE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
            t = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
        # A program counts itself out after its last ticket, so the last one out is alone with the counters. It leaves
        # them at zero: the next launch, or the next replay of a graph, needs no memset.
        if tl.atomic_add(ticket_ptr + 1, 1, sem="acq_rel") == programs - 1:
            tl.store(ticket_ptr, 0)
            tl.store(ticket_ptr + 1, 0)


def launch(
    a: Tensor,
    weight: Tensor,
    blockscale: Tensor,
    alpha: Tensor,
    schedule: ExpertSchedule,
    out: Tensor,
    *,
    a_scale: Tensor | None,
    a_sorted: bool,
    a_div: int,
    out_sorted: bool,
    router_weights: Tensor | None,
    activation: MoeActivation | None,
    is_gated: bool,
    up_first: bool,
    tickets: Tensor | None,
    native: bool,
    config: GemmConfig,
    num_programs: int,
) -> None:
    """Start num_programs programs on the current stream of A's device. `api.py` has checked everything."""
    limit, swiglu_alpha, swiglu_beta = None, 1.0, 0.0
    if activation is not None and activation.limit is not None:  # else alpha and beta must not make another kernel
        limit, (swiglu_alpha, swiglu_beta) = float(activation.limit), activation.swiglu_alpha_beta()
    with torch.cuda.device_of(a):
        grouped_gemm[(num_programs,)](
            a,
            None if a_scale is None else a_scale.view(torch.uint8),
            weight,
            blockscale.view(torch.uint8),
            alpha,
            out,
            schedule.sorted_slots,
            schedule.block_expert,
            schedule.expert_first_block,
            schedule.expert_rows,
            schedule.num_blocks,
            router_weights,
            tickets,
            N=weight.shape[1],
            K=weight.shape[2] * 2,
            A_DIV=a_div,
            A_SORTED=a_sorted,
            OUT_SORTED=out_sorted,
            TWO_ALPHAS=alpha.dim() == 2 and alpha.shape[1] == 2,
            GATED=is_gated,
            UP_FIRST=up_first,
            ACTIVATION="identity" if activation is None else activation.name,
            LIMIT=limit,
            SWIGLU_ALPHA=float(swiglu_alpha),
            SWIGLU_BETA=float(swiglu_beta),
            COLUMN_MAJOR=schedule.order == "column_major",
            NATIVE=native,
            BLOCK_M=config.block_rows,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
