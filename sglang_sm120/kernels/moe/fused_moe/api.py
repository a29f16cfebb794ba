"""The routed experts of one MoE layer over NVFP4 weights: contract, checks, and the plain torch implementation.

The weights are the one copy that SGLang prepares for `flashinfer_cutlass`; every kernel of this package reads it as
it lies. A request that is well formed but not covered has a sentence in `unsupported_reason` (fall back, or raise
UnsupportedError when asked for by name); tensors that contradict each other raise ContractError.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.fused_moe import config, kernel
from sglang_sm120.kernels.moe.fused_moe.config import NATIVE_BACKENDS
from sglang_sm120.kernels.moe.fused_moe.kernel import backend_reason, kernels_unavailable_reason, native_backend
from sglang_sm120.kernels.moe.layer import W13_ORDERS, MoeActivation, Numerics, Nvfp4MoeWeights
from sglang_sm120.kernels.moe.w4a16 import LayerShape
from sglang_sm120.kernels.quantization.nvfp4.api import GROUP_SIZE, round_up

__all__ = [
    "NATIVE_BACKENDS",
    "Backend",
    "MoeActivation",
    "Numerics",
    "Nvfp4MoeWeights",
    "Order",
    "backend_reason",
    "fused_moe",
    "kernels_unavailable_reason",
    "native_backend",
    "unsupported_reason",
    "workspace_bytes",
]

Backend = Literal["auto", "reference", "decode", "middle", "prefill"]
Order = Literal["column_major", "row_major"]

_GATED_ACTIVATIONS = ("silu", "gelu")
_UNGATED_ACTIVATIONS = ("silu", "gelu", "relu2", "identity")
_HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(
    weights: Nvfp4MoeWeights, *, activation: MoeActivation, numerics: str, hidden_dtype: torch.dtype
) -> str | None:
    """One sentence on why `fused_moe` does not cover this layer, or None. Looks at shapes and dtypes, not at values."""
    if numerics not in ("w4a16", "w4a4"):
        return f"numerics {numerics!r} is not covered: w4a16 and w4a4 are"
    if hidden_dtype not in _HIDDEN_DTYPES:
        return f"hidden states of {hidden_dtype} are not covered: bfloat16, float16 and float32 are"
    for name in ("w13", "w2"):
        weight, scale = getattr(weights, f"{name}_weight"), getattr(weights, f"{name}_blockscale")
        if weight.dtype != torch.uint8:
            return f"{name}_weight is {weight.dtype}: NVFP4 is uint8, two e2m1 a byte"
        if scale.dtype != torch.float8_e4m3fn:
            return f"{name}_blockscale is {scale.dtype}: NVFP4 has float8_e4m3fn scales (e8m0 is MXFP4)"
        k = weight.shape[-1] * 2
        if k == 0 or k % GROUP_SIZE:
            size = "hidden" if name == "w13" else "intermediate"
            return f"the {size} size on this rank is {k}: a multiple of {GROUP_SIZE} is needed, each half by itself"
        if scale.shape[-1] != round_up(k // GROUP_SIZE, 4) and scale.shape[-1] == round_up(k // 32, 4):
            return f"{name}_blockscale has one scale for 32 elements: NVFP4 has one for {GROUP_SIZE}"
    covered = _GATED_ACTIVATIONS if weights.is_gated else _UNGATED_ACTIVATIONS
    if activation.name not in covered:
        kind = "gated" if weights.is_gated else "ungated"
        return f"activation {activation.name!r} of a {kind} layer is not covered: {', '.join(covered)} are"
    if activation.limit is not None and not (weights.is_gated and activation.name == "silu"):
        return "a clamp limit is covered for a gated silu only"
    if numerics == "w4a4" and (weights.w13_input_scale is None or weights.w2_input_scale is None):
        return "w4a4 needs w13_input_scale and w2_input_scale, and this checkpoint has no activation scales"
    return None


def workspace_bytes(
    *,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    is_gated: bool = True,
    backend: str = "reference",
    num_experts: int = 1,
    num_sms: int = 188,
) -> int:
    """Upper bound on the memory that `fused_moe` holds at once beside its arguments and its result, in bytes.

    reference: the contributions by slot, fp32 [T, k, H]; the larger of the two weights of ONE expert while it is
    decoded (12 bytes an element); and the activations of all tokens (40 bytes an element where they are widest, with
    their quantiser). It does not depend on the number of experts. What a GEMM library allocates for itself is not
    counted.

    decode, middle, prefill: the slots in 16 bits, what is between the GEMMs, the schedule and, in prefill, quantised
    activations; for `num_experts` on this rank, and for decode `num_sms` multiprocessors.
    """
    num_slots = num_tokens * top_k
    small = 64 * num_slots + 4096
    if backend != "reference":
        shape = LayerShape(num_experts, hidden_size, intermediate_size, is_gated)
        slots = 2 * num_slots * hidden_size
        copies = 2 * num_tokens * hidden_size  # of hidden states whose rows cannot be read as they lie
        return slots + copies + small + kernel.workspace_bytes(backend, shape, num_tokens, top_k, num_sms)
    w13_rows = (2 if is_gated else 1) * intermediate_size
    slots = 4 * num_slots * hidden_size
    one_weight = max(w13_rows * hidden_size, hidden_size * intermediate_size)
    activations = num_tokens * (12 * hidden_size + 4 * w13_rows + 40 * max(hidden_size, intermediate_size))
    return slots + 12 * one_weight + activations + small


def fused_moe(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    numerics: Numerics,
    apply_router_weight_on_input: bool = False,
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    backend: Backend = "auto",
    order: Order | None = None,
) -> Tensor:
    """Run the routed experts of one layer on this rank.

        out[t] = sum over k of  topk_weights[t, k] * W2_e @ act(Wgate_e @ x[t], Wup_e @ x[t]),   e = topk_ids[t, k]

    Args:
        hidden_states: bfloat16, float16 or float32 [T, H], any strides.
        weights: this rank's experts, see Nvfp4MoeWeights.
        topk_weights: float [T, k], used as fp32. A routed scaling factor is NOT applied here: for NVFP4 SGLang folds
            it into these weights.
        topk_ids: int32 or int64 [T, k]; a negative id means skip; an id that comes twice counts twice.
        activation: see MoeActivation.
        numerics: "w4a16": activations stay in hidden_states' precision; "w4a4": they are quantised to NVFP4 before
            each GEMM, under w13_input_scale and w2_input_scale.
        apply_router_weight_on_input: multiply hidden_states by topk_weights before the first GEMM instead of after the
            second; the product is rounded to hidden_states' dtype, as SGLang does. Only with k = 1.
        expert_offset: the global id of this rank's first expert; only with num_global_experts.
        num_global_experts: experts of all ranks. When given, topk_ids are GLOBAL, this rank holds [expert_offset,
            expert_offset + E), and the other experts' slots are skipped: add up the ranks' results. When None, topk_ids
            are local, 0..E-1.
        backend: "auto": on a GPU the kernel that config.choose_backend names for this batch, or the next that covers
            it, the reference at last (said once in the log); on the CPU the reference. "decode", "middle" (W4A16) and
            "prefill" are our kernels, "reference" is plain torch; on the CPU they run as built for the host.
        order: in which a kernel walks the tiles of an expert, see ExpertSchedule; None: the backend's default. The same
            result, but for the order in which decode adds up a tile that lies across multiprocessors.

    Returns:
        Tensor [T, H] of hidden_states' dtype, contiguous, new; zeros for a token whose slots are all skipped.

    Raises:
        ContractError: shapes, dtypes, devices or arguments that contradict each other; on the CPU also an id at or
            beyond the number of experts. On a GPU, where looking would wait for the stream, such a slot is SKIPPED
            (never read out of bounds), which hides a wrong id.
        UnsupportedError: what unsupported_reason says.

    Numerics:
        Weights are decoded to fp32, GEMMs and the sum are fp32, without TF32 whatever the process has set. w4a16
        rounds the activation's result to hidden_states' dtype before the second GEMM (nothing for float32). w4a4
        quantises it from fp32, without that rounding. Slots are added in the order k = 0..K-1, then rounded once. A
        row's last bits may depend on T, through the GEMM library; they do not depend on what other rows hold. NaN and
        infinity stay in the rows that are routed to them.

    Source: reference.py. Captured in a CUDA graph: yes. Memory: workspace_bytes. Cost: O(E * T).
    """
    reason = unsupported_reason(weights, activation=activation, numerics=numerics, hidden_dtype=hidden_states.dtype)
    if reason is not None:
        raise UnsupportedError(
            reason, "a layer that unsupported_reason() accepts", "leave this layer on SGLang's own MoE path"
        )
    if not torch.compiler.is_compiling():  # Dynamo cannot trace the making of messages from symbolic sizes
        _check_weights(weights, hidden_states.device)
        _check_routing(hidden_states, weights, topk_weights, topk_ids, apply_router_weight_on_input)
        _check_expert_range(weights, topk_ids, expert_offset, num_global_experts)
    if backend != "auto" and backend not in config.BACKENDS:
        raise ContractError(f"backend {backend!r}", f"auto, {', '.join(config.BACKENDS)}", "leave it out")
    if hidden_states.shape[0] == 0:
        return torch.empty(0, weights.hidden_size, dtype=hidden_states.dtype, device=hidden_states.device)
    # Opaque where a graph is traced; called directly elsewhere, which spares the dispatcher.
    call = kernel.fused_moe_operator if torch.compiler.is_compiling() else kernel.fused_moe
    return call(
        hidden_states,
        weights.w13_weight,
        weights.w13_blockscale,
        weights.w13_global_scale,
        weights.w2_weight,
        weights.w2_blockscale,
        weights.w2_global_scale,
        weights.w13_input_scale,
        weights.w2_input_scale,
        weights.w13_order,
        weights.is_gated,
        topk_weights,
        topk_ids,
        activation.name,
        activation.alpha,
        activation.beta,
        activation.limit,
        numerics,
        apply_router_weight_on_input,
        expert_offset,
        num_global_experts,
        backend,
        order or "",
    )


def _need_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ContractError(
            f"{name} is on {tensor.device}",
            f"{device}, as hidden_states",
            f"move {name} there",
        )


def _check_weights(weights: Nvfp4MoeWeights, device: torch.device) -> None:
    for name in ("w13_weight", "w2_weight"):
        dims = getattr(weights, name).dim()
        if dims != 3:
            raise ContractError(f"{name} has {dims} dimensions", "[experts, rows, K / 2]", "stack the experts")
    experts, hidden, intermediate = weights.num_experts, weights.hidden_size, weights.intermediate_size
    rows = (2 if weights.is_gated else 1) * intermediate
    if weights.w13_order not in W13_ORDERS:
        raise ContractError(f"w13_order is {weights.w13_order!r}", " or ".join(W13_ORDERS), "name it")

    one_or_experts = [[], [1], [experts]]
    shapes: dict[str, list[list[int]]] = {
        "w13_weight": [[experts, rows, hidden // 2]],
        "w13_blockscale": [[experts, round_up(rows, 128), round_up(hidden // GROUP_SIZE, 4)]],
        "w13_global_scale": [[experts], [experts, 1], *([[experts, 2]] if weights.is_gated else [])],
        "w2_weight": [[experts, hidden, intermediate // 2]],
        "w2_blockscale": [[experts, round_up(hidden, 128), round_up(intermediate // GROUP_SIZE, 4)]],
        "w2_global_scale": [[experts]],
        "w13_input_scale": one_or_experts,
        "w2_input_scale": one_or_experts,
    }
    for name, allowed in shapes.items():
        tensor = getattr(weights, name)
        if tensor is None:  # only the input scales can be
            continue
        if list(tensor.shape) not in allowed:
            raise ContractError(
                f"{name} has shape {list(tensor.shape)}",
                f"{' or '.join(map(str, allowed))} for {experts} experts, hidden size {hidden}, intermediate size "
                f"{intermediate}, is_gated={weights.is_gated}",
                "pass tensors as flashinfer_cutlass gets them: block scales swizzled, each half of w13 padded",
            )
        _need_device(name, tensor, device)
        if name.endswith(("global_scale", "input_scale")) and tensor.dtype != torch.float32:
            raise ContractError(f"{name} is {tensor.dtype}", "float32", "convert it to float32")


def _check_routing(
    hidden_states: Tensor, weights: Nvfp4MoeWeights, topk_weights: Tensor, topk_ids: Tensor, on_input: bool
) -> None:
    if not (hidden_states.dim() == 2 and hidden_states.shape[1] == weights.hidden_size):
        raise ContractError(
            f"hidden_states has shape {list(hidden_states.shape)}",
            f"[T, {weights.hidden_size}], the hidden size of the weights",
            "flatten the tokens to one dimension and pass the weights of the same layer",
        )
    num_tokens = hidden_states.shape[0]
    if not (topk_ids.dim() == 2 and topk_ids.shape[0] == num_tokens and topk_weights.shape == topk_ids.shape):
        raise ContractError(
            f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)}",
            f"both [{num_tokens}, k], for {num_tokens} tokens",
            "pass the router's two results for these tokens",
        )
    integer = topk_ids.dtype in (torch.int32, torch.int64)
    if not integer:
        raise ContractError(f"topk_ids is {topk_ids.dtype}", "int32 or int64", "convert it")
    if not topk_weights.is_floating_point():
        raise ContractError(f"topk_weights is {topk_weights.dtype}", "a float dtype", "convert it")
    _need_device("topk_ids", topk_ids, hidden_states.device)
    _need_device("topk_weights", topk_weights, hidden_states.device)
    if not (not on_input or topk_ids.shape[1] == 1):
        raise ContractError(
            f"apply_router_weight_on_input with k = {topk_ids.shape[1]}",
            "k = 1: one input cannot carry several weights",
            "apply the weights to the outputs",
        )


def _check_expert_range(
    weights: Nvfp4MoeWeights, topk_ids: Tensor, expert_offset: int, num_global_experts: int | None
) -> None:
    if num_global_experts is None:
        if expert_offset != 0:
            raise ContractError(
                f"expert_offset {expert_offset} without num_global_experts",
                "both, when topk_ids are global; neither, when they are local",
                "pass num_global_experts, or map the ids and pass no offset",
            )
        kind, limit = "local", weights.num_experts
    else:
        if not (0 <= expert_offset <= num_global_experts - weights.num_experts):
            raise ContractError(
                f"experts {expert_offset} to {expert_offset + weights.num_experts} of {num_global_experts} global ones",
                "a range inside 0 to num_global_experts",
                "pass expert_offset = ep_rank * local experts and the experts of all ranks",
            )
        kind, limit = "global", num_global_experts
    # Reading a value costs nothing on the CPU; on a GPU it would wait for the stream and break a capture.
    on_cpu = topk_ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_cpu and not bool((topk_ids < limit).all()):
        raise ContractError(
            f"topk_ids holds an id of {limit} or more",
            f"ids below {limit}, the number of {kind} experts; -1 to skip",
            "if the ids are global, pass num_global_experts and expert_offset",
        )
