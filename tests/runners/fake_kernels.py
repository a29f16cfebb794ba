"""What cutlass_fused_moe and b12x are documented to compute, in float64 numpy, from nothing but what they are handed.

Like the real ones they know no Nvfp4MoeWeights: layouts, reciprocals and alphas that are handed over wrong give a wrong
result. `exact` holds the float64 results of the calls, before they are rounded to the output's dtype.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from nvfp4_oracle import E2M1, E4M3, nearest_code, unpack


def unswizzle(scales: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """[pad128(rows), pad4(cols)] codes in the 128x4 layout -> [rows, cols], by the written offset formula."""
    row, col = np.arange(rows)[:, None], np.arange(cols)[None, :]
    tile = (row // 128) * (scales.shape[-1] // 4) + col // 4
    return scales.reshape(-1)[(tile * 32 + row % 32) * 16 + (row // 32) % 4 * 4 + col % 4]


def block_scaled(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """e2m1 * e4m3 of one expert: [rows, K], without any global scale."""
    rows, k = weight.shape[0], weight.shape[1] * 2
    return E2M1[unpack(weight)] * np.repeat(E4M3[unswizzle(scales, rows, k // 16)], 16, axis=-1)


def quantised(x: np.ndarray, reciprocal: float) -> np.ndarray:
    """e2m1 * e4m3 of x under a global scale given as its reciprocal; the alpha of the GEMM undoes that scale."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    scale = E4M3[nearest_code(np.abs(blocks).max(-1) / np.float32(6) * np.float32(reciprocal), E4M3[:127])][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scale > 0, blocks * np.float32(reciprocal) / scale.astype(np.float32), 0)
    return (np.sign(blocks) * E2M1[nearest_code(np.abs(scaled), E2M1[:8])] * scale).reshape(x.shape)


@dataclass
class Gemm:
    """One of the two, as handed over: reciprocal [E], weight codes, scale codes, alpha [E]."""

    reciprocal: np.ndarray
    weight: np.ndarray
    scales: np.ndarray
    alpha: np.ndarray

    def __call__(self, x: np.ndarray, expert: int) -> np.ndarray:
        weight = block_scaled(self.weight[expert], self.scales[expert])
        return self.alpha[expert] * (weight @ quantised(x, self.reciprocal[expert]))


def experts(x, ids, router, first: Gemm, second: Gemm, activate, first_expert: int = 0) -> np.ndarray:
    """[T, H] float64; slots of experts that are not here are skipped."""
    out = np.zeros((len(x), second.weight.shape[1]))
    for token, row in enumerate(x.double().numpy()):
        for slot, expert in enumerate((ids[token] - first_expert).tolist()):
            if 0 <= expert < len(second.weight):
                out[token] += float(router[token, slot]) * second(activate(first(row, expert), expert), expert)
    return out


def up_gate_silu(projected: np.ndarray, limit=None, alpha=1.0, beta=0.0) -> np.ndarray:
    """The rows' first half is up."""
    up, gate = np.split(projected, 2)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + beta)


def relu2(projected: np.ndarray) -> np.ndarray:
    return np.maximum(projected, 0) ** 2


def codes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def vector(scale: torch.Tensor, num_experts: int) -> np.ndarray:
    return scale.expand(num_experts).numpy()


class FakeFlashinfer:
    """`flashinfer.fused_moe`, with the checks of its C++ binding (getQuantParams and runMoe)."""

    core = SimpleNamespace(ActivationType={name: name for name in ("Swiglu", "Geglu", "Relu2")})

    def __init__(self) -> None:
        self.exact: list[np.ndarray] = []
        self.tuning = False
        self.tuned = 0

    @contextlib.contextmanager
    def autotune(self):
        self.tuning = True
        yield
        self.tuning = False

    def cutlass_fused_moe(
        self, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
        quant_scales, *, input_sf, swiglu_alpha, swiglu_beta, swiglu_limit, ep_size, ep_rank, output,
        tune_max_num_tokens, activation_type, use_fused_finalize,
    ):  # fmt: skip
        self.tuned += self.tuning
        assert input_sf is None
        assert not use_fused_finalize
        assert tune_max_num_tokens == 8192
        assert token_selected_experts.dtype == torch.int32
        assert token_final_scales.dtype == torch.float32
        assert fc1_expert_weights.dtype == fc2_expert_weights.dtype == torch.int64
        held, hidden, inner = (int(size) for size in fc2_expert_weights.shape)
        inner *= 16
        halves = 2 if activation_type in ("Swiglu", "Geglu") else 1
        in13, sf13, alpha1, in2, sf2, alpha2 = quant_scales
        assert all(scale.dtype == torch.float32 and scale.ndim <= 1 for scale in (in13, in2, alpha1, alpha2))
        assert all(scale.shape in ((), (held,)) for scale in (in13, in2))
        assert alpha1.shape == alpha2.shape == (held,)
        assert sf13.dtype == sf2.dtype == torch.int32
        assert list(sf13.shape) == [held, halves * (-(-inner // 64) * 64), -(-hidden // 64)]
        assert list(sf2.shape) == [held, -(-hidden // 128) * 128, -(-inner // 64)]
        assert list(fc1_expert_weights.shape) == [held, halves * inner, hidden // 16]

        def activate(projected: np.ndarray, expert: int) -> np.ndarray:
            if activation_type == "Relu2":
                return relu2(projected)
            assert activation_type == "Swiglu"
            if swiglu_limit is None:
                assert swiglu_alpha is swiglu_beta is None
                return up_gate_silu(projected)
            return up_gate_silu(projected, *(float(v[expert]) for v in (swiglu_limit, swiglu_alpha, swiglu_beta)))

        first = Gemm(vector(in13, held), codes(fc1_expert_weights), codes(sf13), alpha1.numpy())
        second = Gemm(vector(in2, held), codes(fc2_expert_weights), codes(sf2), alpha2.numpy())
        result = experts(
            input, token_selected_experts, token_final_scales, first, second, activate, first_expert=ep_rank * held
        )
        assert 0 <= ep_rank < ep_size
        self.exact.append(result)
        output.copy_(torch.from_numpy(result))
        assert output.dtype == output_dtype
        return [output]


@dataclass
class Part:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.dtype.itemsize


class FakeB12x:
    """`b12x.moe.fused_moe` in its tensor-based form, W4A4, with the checks of its planner and its bind."""

    Caps = staticmethod(lambda **arguments: SimpleNamespace(**arguments))

    def __init__(self, storage_policy: str = "keep_source") -> None:
        self.exact: list[np.ndarray] = []
        self.planned: list[int] = []
        self.prepared = 0
        self.storage_policy = storage_policy

    def plan_weights(self, **arguments):
        if arguments["activation"] not in ("silu", "relu2"):
            raise ValueError(f"unsupported activation {arguments['activation']!r}")
        assert arguments["quant_modes"] == ("nvfp4",)
        assert arguments["source_format"] == "modelopt_nvfp4"
        layout = {"up_gate": "w13", "gate_up": "w31"}[arguments["w13_layout"]]
        return SimpleNamespace(**(arguments | {"w13_layout": layout, "storage_policy": self.storage_policy}))

    def plan(self, caps):
        self.planned.append(caps.max_tokens)
        assert caps.quant_mode == "nvfp4"
        return SimpleNamespace(caps=caps, scratch_specs=lambda: (Part((1000 * caps.max_tokens,)),))

    def prepare_weights(self, *, plan, params_dtype, w1_fp4, w2_fp4, w1_blockscale, w2_blockscale, w1_global_scale,
                        w2_global_scale, a1_gscale, a2_gscale):  # fmt: skip
        self.prepared += 1
        assert params_dtype == plan.params_dtype
        experts = plan.num_experts
        assert all(scale.shape in ((1,), (experts,)) for scale in (a1_gscale, a2_gscale))
        assert w1_global_scale.shape == w2_global_scale.shape == (experts,)
        return SimpleNamespace(
            plan=plan, w1_fp4=w1_fp4, w2_fp4=w2_fp4, w1_blockscale=w1_blockscale, w2_blockscale=w2_blockscale,
            a1_gscale=a1_gscale, a2_gscale=a2_gscale, w1_alphas=w1_global_scale / a1_gscale,
            w2_alphas=w2_global_scale / a2_gscale,
        )  # fmt: skip

    def bind(self, plan, *, scratch, a, experts, topk_weights, topk_ids, output, input_scales_static):
        assert len(a) <= plan.caps.max_tokens
        assert [part.shape for part in scratch] == [part.shape for part in plan.scratch_specs()]
        assert a.is_contiguous() and topk_ids.is_contiguous() and topk_weights.is_contiguous()
        assert topk_ids.dtype in (torch.int32, torch.int64) and topk_weights.dtype == torch.float32
        assert not input_scales_static
        return SimpleNamespace(
            caps=plan.caps, a=a, experts=experts, topk_weights=topk_weights, topk_ids=topk_ids, output=output
        )

    def run(self, *, binding):
        caps, prepared = binding.caps, binding.experts
        held = len(prepared.w1_alphas)
        assert ((binding.topk_ids >= 0) & (binding.topk_ids < held)).all(), "small batches read out of bounds"
        is_gated = prepared.plan.activation == "silu"
        first = Gemm(vector(prepared.a1_gscale, held), codes(prepared.w1_fp4), codes(prepared.w1_blockscale),
                     prepared.w1_alphas.numpy())  # fmt: skip
        second = Gemm(vector(prepared.a2_gscale, held), codes(prepared.w2_fp4), codes(prepared.w2_blockscale),
                      prepared.w2_alphas.numpy())  # fmt: skip

        def activate(projected: np.ndarray, _expert: int) -> np.ndarray:
            return up_gate_silu(projected, caps.swiglu_limit) if is_gated else relu2(projected)

        result = experts(binding.a, binding.topk_ids, binding.topk_weights, first, second, activate)
        self.exact.append(result)
        return binding.output.copy_(torch.from_numpy(result))
