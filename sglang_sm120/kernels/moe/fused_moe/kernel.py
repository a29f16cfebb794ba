"""The fused MoE layer put together from the package's kernels, and the torch operator around it."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_sm120.errors import Sm120Error, UnsupportedError
from sglang_sm120.kernels.cuda.module import load
from sglang_sm120.kernels.moe.expert_schedule import api as schedules
from sglang_sm120.kernels.moe.fused_moe import reference
from sglang_sm120.kernels.moe.fused_moe.config import choose_backend
from sglang_sm120.kernels.moe.grouped_gemm_decode import api as decode
from sglang_sm120.kernels.moe.grouped_gemm_middle import api as middle
from sglang_sm120.kernels.moe.grouped_gemm_prefill import api as prefill
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.kernels.moe.sum_slots import api as sums
from sglang_sm120.kernels.moe.w4a16 import LayerShape, device_reason
from sglang_sm120.kernels.quantization.nvfp4.api import quantize_nvfp4

logger = logging.getLogger(__name__)

_READ_AS_THEY_LIE = (
    "w13_weight", "w13_blockscale", "w13_global_scale", "w2_weight", "w2_blockscale", "w2_global_scale",
)  # fmt: skip
_said: set[str] = set()  # fallbacks are logged once


class _How(NamedTuple):
    """What a backend is told beside tensors; order "" is its default."""

    activation: MoeActivation
    numerics: str
    expert_offset: int
    num_global_experts: int | None
    order: str


def backend_reason(
    backend: str,
    weights: Nvfp4MoeWeights,
    num_slots: int,
    *,
    activation: MoeActivation,
    numerics: str,
    hidden_dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """One sentence on why a backend does not cover a call that fused_moe covers, or None."""
    shape = LayerShape.of(weights)
    if backend == "reference":
        return None
    for name in _READ_AS_THEY_LIE:
        tensor = getattr(weights, name)
        if not tensor.is_contiguous():
            return f"{name} has strides {tensor.stride()}: kernels read weights as they lie, contiguous"
        if name.endswith(("weight", "blockscale")) and device.type == "cuda" and tensor.data_ptr() % 16:
            return f"{name} is not aligned to 16 bytes"
    if backend in ("decode", "middle"):
        if numerics != "w4a16":
            return f"{backend} computes in w4a16, not in {numerics}"
        operation = decode if backend == "decode" else middle
        return operation.unsupported_reason(shape, num_slots, hidden_dtype=hidden_dtype, device=device)
    reason = sums.unsupported_reason(hidden_size=shape.hidden_size, dtype=hidden_dtype)
    for n, k, act in (
        (weights.w13_weight.shape[1], shape.hidden_size, activation),
        (shape.hidden_size, shape.intermediate_size, None),
    ):
        reason = reason or prefill.unsupported_reason(
            n=n,
            k=k,
            a_dtype=torch.uint8 if numerics == "w4a4" else hidden_dtype,
            out_dtype=hidden_dtype,
            device=device,
            activation=act,
            is_gated=shape.is_gated and act is not None,
        )
    return reason


def native_backend(
    weights: Nvfp4MoeWeights,
    num_slots: int,
    *,
    activation: MoeActivation,
    numerics: str,
    hidden_dtype: torch.dtype,
    device: torch.device,
) -> str:
    """The kernel of this package that serves such a call: its name, or one sentence on why none does."""
    reasons = []
    for name in choose_backend(LayerShape.of(weights), num_slots, numerics):
        if name == "reference":
            continue
        reason = backend_reason(
            name,
            weights,
            num_slots,
            activation=activation,
            numerics=numerics,
            hidden_dtype=hidden_dtype,
            device=device,
        )
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    return "; ".join(reasons)


def kernels_unavailable_reason(device: torch.device) -> str | None:
    """One sentence on why this package's kernels cannot be loaded on a device, or None. Loads all of them."""
    reason = device_reason(device)
    if reason is not None:
        return reason
    try:
        for source in (decode.SOURCE, middle.SOURCE, schedules.SOURCE, sums.SOURCE):
            load(source, device)
    except Sm120Error as error:
        return error.found
    return None


def workspace_bytes(backend: str, shape: LayerShape, num_tokens: int, top_k: int, num_sms: int) -> int:
    """What the operations of a backend allocate beside the slots, in bytes."""
    num_slots = num_tokens * top_k
    if backend == "decode":
        return decode.workspace_bytes(shape, num_slots, num_sms=num_sms)
    if backend == "middle":
        return middle.workspace_bytes(shape, num_slots, num_tokens, num_sms=num_sms)
    rows = prefill.choose_block_rows(num_tokens, top_k, shape.num_experts)
    schedule = schedules.workspace_bytes(num_slots=num_slots, num_experts=shape.num_experts, block_rows=rows)
    between = 4 * num_slots * shape.intermediate_size
    # Where experts have activation scales of their own, a token is copied and quantised for each of its slots.
    quantised = num_slots * (3 * shape.hidden_size + shape.intermediate_size)
    return schedule + between + quantised + 64 * shape.num_experts


def run(
    hidden_states: Tensor,
    weights: Nvfp4MoeWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: MoeActivation,
    numerics: str,
    apply_router_weight_on_input: bool,
    expert_offset: int,
    num_global_experts: int | None,
    backend: str,
    order: str,
) -> Tensor | None:
    """The layer by a kernel of this package, or None: the reference is to serve it. At least one slot.

    Raises: UnsupportedError, when a backend was asked for by name and does not cover the call.
    """
    device, dtype = hidden_states.device, hidden_states.dtype
    how = _How(activation, numerics, expert_offset, num_global_experts, order)
    asked = backend != "auto"
    names = (backend,) if asked else choose_backend(LayerShape.of(weights), topk_ids.numel(), numerics)
    for name in names:
        if name == "reference":
            return None
        reason = backend_reason(
            name,
            weights,
            topk_ids.numel(),
            activation=activation,
            numerics=numerics,
            hidden_dtype=dtype,
            device=device,
        )
        if reason is None:
            x, router_weights = hidden_states, topk_weights
            if apply_router_weight_on_input:
                # SGLang multiplies in the dtype of the hidden states, with the weight rounded to it first.
                x, router_weights = x * topk_weights.to(dtype), torch.ones_like(topk_weights, dtype=torch.float32)
            try:
                slots = _BACKENDS[name](x, weights, router_weights, topk_ids, how)
            except UnsupportedError as error:  # such as a machine on which a kernel cannot be loaded
                reason = error.found
                if asked:
                    raise
            else:
                return sums.sum_slots(
                    slots,
                    topk_ids,
                    num_experts=weights.num_experts,
                    expert_offset=expert_offset,
                    implementation="kernel",
                )
        if asked:
            raise UnsupportedError(
                f"backend {name!r}: {reason}", "a layer that this backend covers", "leave backend out, or 'auto'"
            )
        _say_once(f"fused_moe: not by {name}, since {reason}")
    return None


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.info("%s", message)


def _decode(x: Tensor, weights: Nvfp4MoeWeights, router_weights: Tensor, ids: Tensor, how: _How) -> Tensor:
    return decode.grouped_gemm_decode(
        x,
        weights,
        router_weights,
        ids,
        activation=how.activation,
        expert_offset=how.expert_offset,
        num_global_experts=how.num_global_experts,
        order=how.order or None,
    )


def _middle(x: Tensor, weights: Nvfp4MoeWeights, router_weights: Tensor, ids: Tensor, how: _How) -> Tensor:
    return middle.grouped_gemm_middle(
        x,
        weights,
        router_weights,
        ids,
        activation=how.activation,
        expert_offset=how.expert_offset,
        num_global_experts=how.num_global_experts,
        order=how.order or None,
    )


def _prefill(x: Tensor, weights: Nvfp4MoeWeights, router_weights: Tensor, ids: Tensor, how: _How) -> Tensor:
    """Schedule, GEMM1 with the activation, GEMM2 with the router's weights; W4A4 quantises before either GEMM."""
    num_tokens, top_k = ids.shape
    shape = LayerShape.of(weights)
    schedule = schedules.expert_schedule(
        ids,
        num_experts=shape.num_experts,
        block_rows=prefill.choose_block_rows(num_tokens, top_k, shape.num_experts),
        order="row_major" if how.order == "row_major" else "column_major",
        expert_offset=how.expert_offset,
        num_global_experts=how.num_global_experts,
    )
    alpha1, alpha2 = _halves(weights), weights.w2_global_scale
    a: Tensor = x
    a_scale: Tensor | None = None
    a_div = top_k
    if how.numerics == "w4a4":
        scale1, scale2 = weights.w13_input_scale, weights.w2_input_scale
        assert scale1 is not None and scale2 is not None  # for the type checker: unsupported_reason has refused this
        alpha1 = alpha1 * (scale1.reshape(-1, 1) if alpha1.dim() == 2 else scale1.reshape(-1))
        alpha2 = alpha2 * scale2.reshape(-1)
        if scale1.numel() == 1:
            a, a_scale = quantize_nvfp4(x, scale1)
        else:  # a token is quantised differently for every expert that it goes to
            a, a_scale = quantize_nvfp4(x.repeat_interleave(top_k, 0), _of_slots(scale1, ids, how.expert_offset))
            a_div = 1
    else:
        a = x.contiguous()
    # fp32 between the GEMMs of W4A4: it is quantised from there without a rounding in between.
    between = torch.empty(
        ids.numel(),
        shape.intermediate_size,
        dtype=torch.float32 if how.numerics == "w4a4" else x.dtype,
        device=x.device,
    )
    prefill.grouped_gemm_prefill(
        a,
        weights.w13_weight,
        weights.w13_blockscale,
        alpha1,
        schedule,
        between,
        a_scale=a_scale,
        a_div=a_div,
        activation=how.activation,
        is_gated=shape.is_gated,
        w13_order="gate_up" if weights.w13_order == "gate_up" else "up_gate",
    )
    h: Tensor = between
    h_scale: Tensor | None = None
    if how.numerics == "w4a4":
        assert scale2 is not None
        h, h_scale = quantize_nvfp4(
            between, scale2 if scale2.numel() == 1 else _of_slots(scale2, ids, how.expert_offset)
        )
    out = torch.empty(ids.numel(), shape.hidden_size, dtype=x.dtype, device=x.device)
    return prefill.grouped_gemm_prefill(
        h,
        weights.w2_weight,
        weights.w2_blockscale,
        alpha2,
        schedule,
        out,
        a_scale=h_scale,
        router_weights=router_weights.to(torch.float32).reshape(-1),
    )


_BACKENDS = {"decode": _decode, "middle": _middle, "prefill": _prefill}


def _halves(weights: Nvfp4MoeWeights) -> Tensor:
    """w13's global scales as its rows lie in memory: [E, 2] for the first and second half, or [E]."""
    scale = weights.w13_global_scale
    if scale.dim() == 2 and scale.shape[1] == 2:
        return scale.flip(1) if weights.w13_order == "up_gate" else scale
    return scale.reshape(-1)


def _of_slots(scale: Tensor, ids: Tensor, offset: int) -> Tensor:
    """A scale an expert -> a scale a slot; skipped slots get expert 0's, and are not read afterwards."""
    local = ids.reshape(-1).to(torch.int64) - offset
    held = (local >= 0) & (local < scale.numel())
    return scale.reshape(-1)[torch.where(held, local, torch.zeros_like(local))]


def fused_moe(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w13_blockscale: Tensor,
    w13_global_scale: Tensor,
    w2_weight: Tensor,
    w2_blockscale: Tensor,
    w2_global_scale: Tensor,
    w13_input_scale: Tensor | None,
    w2_input_scale: Tensor | None,
    w13_order: str,
    is_gated: bool,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    alpha: float | None,
    beta: float | None,
    limit: float | None,
    numerics: str,
    apply_router_weight_on_input: bool,
    expert_offset: int,
    num_global_experts: int | None,
    backend: str,
    order: str,
) -> Tensor:
    """See `api.fused_moe`; arguments are checked already. Flat, as an operator takes them."""
    weights = Nvfp4MoeWeights(
        w13_weight=w13_weight,
        w13_blockscale=w13_blockscale,
        w13_global_scale=w13_global_scale,
        w2_weight=w2_weight,
        w2_blockscale=w2_blockscale,
        w2_global_scale=w2_global_scale,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
        w13_order=w13_order,
        is_gated=is_gated,
    )
    call = {
        "activation": MoeActivation(activation, alpha, beta, limit),
        "numerics": numerics,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "expert_offset": expert_offset,
        "num_global_experts": num_global_experts,
    }
    out = None
    if topk_ids.numel() > 0 and (backend != "auto" or hidden_states.device.type == "cuda"):
        with torch.no_grad():
            out = run(hidden_states, weights, topk_weights, topk_ids, backend=backend, order=order, **call)  # type: ignore[arg-type]
    if out is None:
        out = reference.fused_moe(hidden_states, weights, topk_weights, topk_ids, **call)  # type: ignore[arg-type]
    return out


# One opaque operator, for torch.compile and piecewise CUDA graphs.
fused_moe_operator = torch.library.custom_op("sglang_sm120::fused_moe", fused_moe, mutates_args=())


@fused_moe_operator.register_fake
def _(hidden_states: Tensor, *args: object) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
