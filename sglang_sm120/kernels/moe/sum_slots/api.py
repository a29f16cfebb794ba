"""The last step of a MoE layer on one rank: every token's slots are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.sum_slots import kernel, reference

__all__ = ["SOURCE", "sum_slots", "unsupported_reason"]

SOURCE = kernel.SOURCE


def unsupported_reason(*, hidden_size: int, dtype: torch.dtype) -> str | None:
    """One sentence on why the kernel does not cover this (the reference does), or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"slots of {dtype} are not covered: bfloat16 and float16 are"
    if hidden_size % 8:
        return f"hidden size {hidden_size} is not covered: the kernel adds 8 columns a thread"
    return None


def sum_slots(
    slots: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    expert_offset: int = 0,
    implementation: str = "auto",
) -> Tensor:
    """Add up the slots of every token that an expert of this rank has served.

        out[t] = sum over j = 0..k-1, in this order, of  slots[t * k + j]   where topk_ids[t, j] is held here

    Args:
        slots: bfloat16, float16 or float32 [T * k, H], contiguous; router weights are applied already. Slots that no
            expert of this rank serves may hold anything.
        topk_ids: int32 or int64 [T, k]; held here is expert_offset <= id < expert_offset + num_experts.
        num_experts: experts on this rank.
        expert_offset: the id of its first expert.
        implementation: "auto": the kernel on a GPU, plain torch on the CPU; "kernel"; "reference".

    Returns:
        Tensor [T, H] of slots' dtype, new; zeros for a token without any.

    Raises:
        ContractError: shapes or dtypes that contradict each other. UnsupportedError: "kernel" where it is not covered.

    Numerics: fp32, rounded once. The same bits always.

    Source: kernel.cu, reference.py. Captured in a CUDA graph: yes, once loaded.
    """
    if topk_ids.dim() != 2 or slots.dim() != 2 or slots.shape[0] != topk_ids.numel() or not slots.is_contiguous():
        raise ContractError(
            f"slots {list(slots.shape)} with strides {slots.stride()} and topk_ids {list(topk_ids.shape)}",
            "contiguous [T * k, H] and [T, k]",
            "pass the second GEMM's result and the ids it was made with",
        )
    reason = unsupported_reason(hidden_size=slots.shape[1], dtype=slots.dtype)
    if reason is None and slots.device.type != "meta" and slots.data_ptr() % 16:
        reason = "slots that are not aligned to 16 bytes are not covered: the kernel reads 8 columns at once"
    if implementation == "kernel" and reason is not None:
        raise UnsupportedError(reason, "what the kernel covers", "use implementation='reference'")
    out = torch.empty(topk_ids.shape[0], slots.shape[1], dtype=slots.dtype, device=slots.device)
    if out.numel() == 0:
        return out
    on_gpu = slots.device.type == "cuda"
    run = (
        kernel
        if reason is None and (implementation == "kernel" or (implementation == "auto" and on_gpu))
        else reference
    )
    run.sum_slots(slots, topk_ids.contiguous(), out, num_experts=num_experts, expert_offset=expert_offset)
    return out
