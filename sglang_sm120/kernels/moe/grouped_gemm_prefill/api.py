"""Grouped GEMM over a schedule of experts, for many rows an expert: contract and checks.

The weights are the one copy that SGLang prepares for `flashinfer_cutlass`; block scales are read where they lie, in the
128x4 swizzled layout. One call is one GEMM of a MoE layer, with what can follow it: the two global scales of a gated
layer, its activation, the router's weight. Nothing is read back to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
from torch import Tensor

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.expert_schedule.api import ExpertSchedule
from sglang_sm120.kernels.moe.grouped_gemm_prefill import config as configs
from sglang_sm120.kernels.moe.grouped_gemm_prefill import kernel, reference
from sglang_sm120.kernels.moe.grouped_gemm_prefill.config import GemmConfig, choose_block_rows
from sglang_sm120.kernels.quantization.nvfp4.api import GROUP_SIZE, round_up

if TYPE_CHECKING:  # fused_moe calls this operation
    from sglang_sm120.kernels.moe.layer import MoeActivation

__all__ = ["GemmConfig", "Rows", "choose_block_rows", "grouped_gemm_prefill", "unsupported_reason"]

Rows = Literal["slot", "sorted"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_GATED_ACTIVATIONS = ("silu", "gelu")
_UNGATED_ACTIVATIONS = ("silu", "gelu", "relu2", "identity")
_INTERPRETED = not isinstance(kernel.grouped_gemm, triton.JITFunction)
_INTERPRETED_PROGRAMS = 3  # a few, so that the persistent loop is run


def unsupported_reason(
    *,
    n: int,
    k: int,
    a_dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
    activation: MoeActivation | None = None,
    is_gated: bool = False,
) -> str | None:
    """One sentence on why `grouped_gemm_prefill` does not cover this, or None. a_dtype uint8 stands for W4A4."""
    if a_dtype not in (torch.uint8, *_FLOATS):
        return f"A of {a_dtype} is not covered: packed uint8, bfloat16, float16 and float32 are"
    if out_dtype not in _FLOATS:
        return f"out of {out_dtype} is not covered: bfloat16, float16 and float32 are"
    if k == 0 or k % GROUP_SIZE:
        return f"K is {k}: a multiple of {GROUP_SIZE} is needed"
    if n * k // 2 >= 2**31:
        return f"one expert's weight of {n} x {k} has more than 2**31 bytes, and offsets in an expert are int32"
    if is_gated and activation is None:
        return "a gated GEMM without an activation is not covered: the halves are never written"
    if activation is not None:
        covered = _GATED_ACTIVATIONS if is_gated else _UNGATED_ACTIVATIONS
        if activation.name not in covered:
            kind = "a gated" if is_gated else "an ungated"
            return f"activation {activation.name!r} of {kind} layer is not covered: {', '.join(covered)} are"
        if activation.limit is not None and not (is_gated and activation.name == "silu"):
            return "a clamp limit is covered for a gated silu only"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no conversion from e4m3: compute capability 8.9 is the lowest covered"
    if device.type not in ("cuda", "cpu"):
        return f"device {device} is not covered: cuda and cpu are"
    if device.type == "cuda" and a_dtype == torch.float32:
        return "A of float32 is covered on a CPU only: no tensor core multiplies it without rounding"
    if _INTERPRETED and torch.bfloat16 in (a_dtype, out_dtype):
        return "Triton's interpreter computes bfloat16 on its raw bits: use float16 or float32 there"
    return None


def grouped_gemm_prefill(
    a: Tensor,
    weight: Tensor,
    blockscale: Tensor,
    alpha: Tensor,
    schedule: ExpertSchedule,
    out: Tensor,
    *,
    a_scale: Tensor | None = None,
    a_rows: Rows = "slot",
    a_div: int = 1,
    out_rows: Rows = "slot",
    router_weights: Tensor | None = None,
    activation: MoeActivation | None = None,
    is_gated: bool = False,
    w13_order: str = "up_gate",
    tickets: Tensor | None = None,
    config: GemmConfig | None = None,
    num_programs: int | None = None,
) -> Tensor:
    """Multiply every scheduled slot's row of A by its expert's weight, and finish it.

        y[s]          = (W_e @ A[row(s)]) * alpha_e                       W_e = e2m1 * e4m3, A = e2m1 * e4m3 or floats
        out[place(s)] = router_weights[s] * act(y[s])                     ungated, or act absent; of N columns
        out[place(s)] = router_weights[s] * act(gate(y[s]), up(y[s]))     gated; of N / 2 columns

    Args:
        a: uint8 [R, K/2] with a_scale (W4A4: e2m1, even k in the low nibble), else bfloat16 or float16 [R, K] (W4A16),
            on a CPU also float32; contiguous.
        weight: uint8 [E, N, K/2], contiguous.
        blockscale: float8_e4m3fn [E, pad128(N), pad4(K/16)], 128x4 swizzled, contiguous; its padding may hold anything.
        alpha: float32 [E], or [E, 2] for the first and the second half of the N rows AS THEY LIE in weight; contiguous.
            s2 of the weight, for W4A4 times s2 of A.
        schedule: see ExpertSchedule; block_rows of 16, 32, 64 or 128. Its padding may hold anything.
        out: bfloat16, float16 or float32 [rows, N], gated [rows, N / 2]; contiguous. Rows of slots that are not in the
            schedule, and of padding, are NOT written: whoever sums up the slots has to skip them.
        a_scale: float8_e4m3fn [R, K/16], row-major (not swizzled), contiguous.
        a_rows: "slot": slot s reads row s // a_div of A; "sorted": it reads the row of its position in sorted_slots.
        a_div: k where A has one row a token, 1 where it has one a slot. Only with a_rows="slot".
        out_rows: "slot": slot s writes row s of out; "sorted": the row of its position in sorted_slots.
        router_weights: float32 [slots], by slot id; contiguous.
        activation: see MoeActivation; None for none. Gated: needed.
        is_gated: whether N holds two halves, each of N / 2 rows.
        w13_order: which half is which when gated: "up_gate" (CUTLASS) or "gate_up".
        tickets: None: program p takes tiles p, p + P, ... Else int32 [2], zero before the first launch, for launches
            that never overlap: programs take tiles as they get free, and leave it zero.
        config: the tile; None: config.choose_for_block_rows.
        num_programs: P of the persistent grid; None: as many as the GPU holds at once.

    Returns:
        Tensor: out.

    Raises:
        ContractError: shapes, dtypes, layouts or devices that contradict each other. Slot ids are not looked at: rows
            s // a_div of A and s of out have to exist.
        UnsupportedError: what unsupported_reason says.

    Numerics:
        Products are exact and sums fp32, in steps of block_k; on compute capability 12.x W4A4 runs on the FP4 tensor
        cores, elsewhere on fp16 operands that hold the same values. All that follows is fp32, rounded once to out's
        dtype. exp, erf and the sigmoid's division are the GPU's approximations (a few ulp). NaN and infinity in A or a
        router weight stay in their row, in a weight in its column. The same input gives the same bits whatever P and
        tickets are; another block_k may give others.

    Source: kernel.py; reference.py on a CPU without TRITON_INTERPRET=1, which reads counts on the host and ignores
    tickets, config and num_programs. Captured in a CUDA graph: yes, after one call outside (it compiles the kernel).
    Memory: none.
    """
    n, k = _check(a, weight, blockscale, alpha, schedule, out, a_scale, is_gated, w13_order)
    _check_rows(a, schedule, out, a_rows, a_div, out_rows, router_weights, tickets)
    reason = unsupported_reason(
        n=n, k=k, a_dtype=a.dtype, out_dtype=out.dtype, device=a.device, activation=activation, is_gated=is_gated
    )
    if reason is not None:
        raise UnsupportedError(reason, "a GEMM that unsupported_reason() accepts", "use another path for this layer")
    if n == 0 or schedule.block_expert.numel() == 0:
        return out
    if a.device.type == "cpu" and not _INTERPRETED:
        return reference.grouped_gemm_prefill(
            a, weight, blockscale, alpha, schedule, out, a_scale=a_scale, a_rows=a_rows, a_div=a_div, out_rows=out_rows,
            router_weights=router_weights, activation=activation, is_gated=is_gated, w13_order=w13_order,
        )  # fmt: skip

    numerics = "w4a16" if a_scale is None else "w4a4"
    capability = torch.cuda.get_device_capability(a.device) if a.device.type == "cuda" else (0, 0)
    of_this: dict[str, Any] = {"numerics": numerics, "capability": capability}
    if config is None:
        config = configs.choose_for_block_rows(schedule.block_rows, n, k, **of_this)
    _check_config(config, schedule, n, of_this)
    if num_programs is None:
        num_programs = _INTERPRETED_PROGRAMS
        if a.device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count
            num_programs = configs.programs_per_sm(config, **of_this) * multiprocessors
    _need(num_programs >= 1, f"num_programs {num_programs}", "1 or more", "leave it out")
    kernel.launch(
        a, weight, blockscale, alpha, schedule, out, a_scale=a_scale, a_sorted=a_rows == "sorted", a_div=a_div,
        out_sorted=out_rows == "sorted", router_weights=router_weights, activation=activation, is_gated=is_gated,
        up_first=w13_order == "up_gate", tickets=tickets, native=numerics == "w4a4" and capability[0] == 12,
        config=config, num_programs=num_programs,
    )  # fmt: skip
    return out


def _need(holds: bool, found: str, needed: str, fix: str) -> None:
    if not holds:
        raise ContractError(found, needed, fix)


def _need_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shapes: list[list[int]], device: torch.device) -> None:
    _need(
        list(tensor.shape) in shapes and tensor.dtype == dtype,
        f"{name} is {tensor.dtype} {list(tensor.shape)}",
        f"{dtype} {' or '.join(map(str, shapes))}",
        "pass the tensors of one layer, block scales swizzled, for one schedule",
    )
    _need_place(name, tensor, device)


def _need_place(name: str, tensor: Tensor, device: torch.device) -> None:
    _need(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}", "contiguous", f"copy {name}")
    _need(tensor.device == device, f"{name} is on {tensor.device}", f"{device}, as a", f"move {name} there")


def _check(
    a: Tensor, weight: Tensor, blockscale: Tensor, alpha: Tensor, schedule: ExpertSchedule, out: Tensor,
    a_scale: Tensor | None, is_gated: bool, w13_order: str,
) -> tuple[int, int]:  # fmt: skip
    """Returns N and K."""
    _need(weight.dim() == 3, f"weight has {weight.dim()} dimensions", "[E, N, K/2]", "stack the experts")
    experts, n, packed = weight.shape
    k, device = packed * 2, a.device
    _need_tensor("weight", weight, torch.uint8, [[experts, n, packed]], device)
    scales = [experts, round_up(n, 128), round_up(k // GROUP_SIZE, 4)]
    _need_tensor("blockscale", blockscale, torch.float8_e4m3fn, [scales], device)
    halves = [[experts, 2]] if n % 2 == 0 else []
    _need_tensor("alpha", alpha, torch.float32, [[experts], [experts, 1], *halves], device)
    _need(not (is_gated and n % 2), f"a gated weight of {n} rows", "two equal halves", "pass is_gated=False")
    _need(w13_order in ("up_gate", "gate_up"), f"w13_order is {w13_order!r}", "up_gate or gate_up", "name it")
    _need(a.dim() == 2, f"a has {a.dim()} dimensions", "[R, K], or [R, K/2] packed", "flatten it")
    if a_scale is None:
        _need(a.dtype != torch.uint8, "a is packed and a_scale is None", "both", "pass the result of quantize_nvfp4")
        _need_tensor("a", a, a.dtype, [[a.shape[0], k]], device)
    else:
        _need_tensor("a", a, torch.uint8, [[a.shape[0], packed]], device)
        _need_tensor("a_scale", a_scale, torch.float8_e4m3fn, [[a.shape[0], k // GROUP_SIZE]], device)
    _need(out.dim() == 2, f"out has {out.dim()} dimensions", "[rows, columns]", "flatten it")
    _need_tensor("out", out, out.dtype, [[out.shape[0], n // 2 if is_gated else n]], device)
    for name in ("expert_first_block", "expert_rows"):
        _need_tensor(f"schedule.{name}", getattr(schedule, name), torch.int32, [[experts]], device)
    _need_tensor("schedule.num_blocks", schedule.num_blocks, torch.int32, [[1]], device)
    for name in ("sorted_slots", "block_expert"):
        tensor = getattr(schedule, name)
        _need_tensor(f"schedule.{name}", tensor, torch.int32, [[tensor.numel()]], device)
    return n, k


def _check_rows(
    a: Tensor, schedule: ExpertSchedule, out: Tensor, a_rows: str, a_div: int, out_rows: str,
    router_weights: Tensor | None, tickets: Tensor | None,
) -> None:  # fmt: skip
    capacity = schedule.sorted_slots.numel()
    for name, rows, tensor in (("a", a_rows, a), ("out", out_rows, out)):
        _need(rows in ("slot", "sorted"), f"{name}_rows is {rows!r}", "slot or sorted", "pass one of the two")
        _need(
            rows == "slot" or tensor.shape[0] >= capacity,
            f"{name} has {tensor.shape[0]} rows, and sorted_slots {capacity}",
            f"as many rows, when they are {name}_rows='sorted'",
            "allocate a row for every entry of sorted_slots",
        )
    _need(a_div >= 1, f"a_div {a_div}", "1 or more", "pass k, or 1")
    _need(a_rows == "slot" or a_div == 1, f"a_div {a_div} with sorted rows", "1", "leave a_div out")
    if router_weights is not None:
        shapes = [[out.shape[0] if out_rows == "slot" else router_weights.numel()]]
        _need_tensor("router_weights", router_weights, torch.float32, shapes, a.device)
    if tickets is not None:
        _need_tensor("tickets", tickets, torch.int32, [[2]], a.device)


def _check_config(config: GemmConfig, schedule: ExpertSchedule, n: int, of_this: dict[str, Any]) -> None:
    _need(
        config.block_rows == schedule.block_rows,
        f"a tile of {config.block_rows} rows for a schedule of {schedule.block_rows}",
        "equal block_rows",
        "leave config out, or build the schedule for it",
    )
    _need(
        configs.fits(config, **of_this),
        f"{config} may take {configs.shared_memory_bound(config, **of_this)} bytes of shared memory",
        "what a block has on this GPU",
        "leave config out",
    )
    tiles = schedule.block_expert.numel() * -(-n // config.block_n)
    _need(tiles < 2**31, f"{tiles} tiles", "below 2**31", "split the tokens")
