"""b12x's own planner and compiler on this adapter's arguments, for an SM120 GPU that need not be there.

Opt-in: B12X_PATHS names the folders (as PYTHONPATH does) that hold FlashInfer 0.7.2 and nvidia-cutlass-dsl 4.8.0 with
its `nvidia_cutlass_dsl/dsl_packages`. Compiles for sm_120a; nothing is launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.environ.get("B12X_PATHS", "")

pytestmark = pytest.mark.skipif(not PATHS, reason="B12X_PATHS does not name FlashInfer 0.7.2 and nvidia-cutlass-dsl")

# b12x's own offline worker stands in for the GPU: 188 multiprocessors, 99 KB of shared memory a block.
PREPARE = """
import importlib, json, multiprocessing, sys
import torch
pool = importlib.import_module("b12x._lib.compile_pool")
pool._initialize_worker(
    0, (12, 0), "GPU-0", "NVIDIA RTX PRO 6000 Blackwell", 188, 101376, 102400, multiprocessing.Array("i", 2)
)
from sglang_sm120.kernels.moe.layer import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.runners import b12x, handover
from sglang_sm120.runners.base import LayerSpec
device = torch.device("cuda", 0)
def key(tokens, activation="silu", limit=None, experts=128, hidden=4096, inner=768, top_k=8, dtype=torch.bfloat16):
    return b12x.PlanKey(experts, hidden, inner, activation, limit, dtype, top_k, tokens, device)
"""


def run(code: str, tmp_path: Path) -> dict:
    path = os.pathsep.join([str(ROOT), PATHS])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    environ |= {
        "PYTHONPATH": path,
        "CUTE_DSL_ARCH": "sm_120a",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(tmp_path),
        "B12X_CUTE_COMPILE_CACHE_DIR": str(tmp_path / "b12x"),
        "B12X_CUTE_COMPILE_DISK_CACHE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PREPARE + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_plans_leave_the_weights_and_what_is_refused(tmp_path: Path) -> None:
    found = run(
        """
        def describe(plan):
            if isinstance(plan, str):
                return plan
            return [plan.plan.launch_plan.implementation, plan.scratch_bytes(), plan.weight_plan.w13_layout]
        result = {str(tokens): describe(b12x.planned(key(tokens))) for tokens in (1, 4, 64, 4096, 131072)}
        result["limit"] = describe(b12x.planned(key(64, limit=7.0)))
        result["relu2"] = describe(b12x.planned(key(64, "relu2")))
        result["half"] = describe(b12x.planned(key(64, dtype=torch.float16)))
        result["oai"] = describe(b12x.planned(key(64, "swigluoai_uninterleave")))
        result["gelu"] = describe(b12x.planned(key(64, "gelu")))
        b12x.W13_LAYOUT = "gate_up"
        result["gate first"] = describe(b12x.planned(key(32)))
        print(json.dumps(result))
        """,
        tmp_path,
    )
    assert [found[tokens][0] for tokens in ("1", "4", "64", "4096")] == ["micro", "micro", "dynamic", "dynamic"]
    assert {found[name][2] for name in ("1", "4", "64", "4096", "limit", "relu2", "half")} == {"w13"}
    assert 2**19 < found["1"][1] < found["4"][1] < found["4096"][1] < 2**28
    for name in ("oai", "gate first"):
        assert "would change the shared weights (w13_layout w31" in found[name]
    assert "unsupported activation 'gelu'" in found["gelu"]


def test_weights_are_prepared_as_they_lie(tmp_path: Path) -> None:
    """Their addresses are kept, and the alphas that b12x computes are the products of the scales."""
    found = run(
        """
        from sglang_sm120.kernels.quantization.nvfp4.api import round_up
        E, H, I = 4, 256, 128
        byte = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8)
        weights = Nvfp4MoeWeights(
            byte(E, 2 * I, H // 2), byte(E, 2 * I, H // 16).view(torch.float8_e4m3fn), torch.rand(E, 1).repeat(1, 2),
            byte(E, H, I // 2), byte(E, H, I // 16).view(torch.float8_e4m3fn), torch.rand(E), torch.tensor(0.25),
            torch.rand(E),
        )
        plan = b12x.planned(key(8, experts=E, hidden=H, inner=I))
        experts = b12x._load().prepare_weights(
            plan=plan.weight_plan, params_dtype=torch.bfloat16, **b12x.weight_arguments(weights)
        )
        pairs = [(experts.w1_fp4, weights.w13_weight), (experts.w1_blockscale, weights.w13_blockscale),
                 (experts.w2_fp4, weights.w2_weight), (experts.w2_blockscale, weights.w2_blockscale)]
        close = torch.testing.assert_close
        close(experts.w1_alphas, weights.w13_global_scale[:, 0] * 0.25)
        close(experts.w2_alphas, weights.w2_global_scale * weights.w2_input_scale)
        print(json.dumps({"same": [a.data_ptr() == b.data_ptr() for a, b in pairs],
                          "shared input": experts.can_share_input(input_scales_static=False)}))
        """,
        tmp_path,
    )
    assert found == {"same": [True] * 4, "shared input": True}


@pytest.mark.parametrize("gated", [True, False])
def test_what_b12x_s_own_reference_makes_of_it(tmp_path: Path, gated: bool) -> None:
    """Its plain torch definition of the kernels, on what its prepare_weights made of our arguments, is our layer; but
    for the result of the activation, which it rounds to bfloat16 before it quantises it."""
    found = run(
        f"GATED = {gated}\nsys.path.insert(0, {str(ROOT / 'tests' / 'kernels')!r})\n"
        + """
import dataclasses
import moe_oracle
from moe_oracle import inputs, layer, oracle
from b12x.moe._shared.kernels.reference import moe_reference_nvfp4
E, H, I, K, T = 4, 256, 128, 2, 6
activation = MoeActivation("silu" if GATED else "relu2", limit=2.0 if GATED else None)
lay = layer(E, H, I, GATED)
lay = dataclasses.replace(
    lay, s2=lay.s2 | ({"gate": lay.s2["up"]} if GATED else {}),
    input_scale={name: (lay.input_scale[name] * 0 + 2.0**-8).astype("float32") for name in ("w13", "w2")},
)
weights = lay.weights(padding=0)
plan = b12x.planned(key(8, activation.name, activation.limit, experts=E, hidden=H, inner=I, top_k=K))
experts = b12x._load().prepare_weights(
    plan=plan.weight_plan, params_dtype=torch.bfloat16, **b12x.weight_arguments(weights)
)
x, router, ids = inputs(T, K, E, H, torch.bfloat16)
ids[2, 0] = ids[3, 1] = -1
exact = moe_oracle.activate
moe_oracle.activate = lambda *a: torch.from_numpy(exact(*a)).to(torch.bfloat16).double().numpy()
ours = oracle(x, lay, router, ids, activation, "w4a4")
sent_router, sent_ids = b12x.without_skipped(router, ids, E)
def error(alpha=1.0, swapped=False, gscale=1.0):
    w1 = torch.cat(experts.w1_fp4.chunk(2, 1)[::-1], 1) if swapped else experts.w1_fp4
    theirs = moe_reference_nvfp4(
        x.float(), w1, experts.w1_blockscale, experts.w1_alphas * alpha, experts.w2_fp4, experts.w2_blockscale,
        experts.w2_alphas, experts.a1_gscale * gscale, experts.a2_gscale, sent_ids, sent_router, E, H, I,
        activation=activation.name, swiglu_limit=activation.limit,
    ).double()
    return ((theirs - ours).norm() / ours.norm()).item()
print(json.dumps([error(), error(alpha=2.0), error(swapped=True), error(gscale=2.0)]))
""",
        tmp_path,
    )
    assert found[0] < 2**-8, "as near as bfloat16 results are"
    assert min(found[1:]) > 0.1, "a wrong alpha, order or reciprocal is not"


def test_the_kernels_of_a_plan_compile_for_sm_120a(tmp_path: Path) -> None:
    found = run(
        """
        impl = importlib.import_module("b12x.moe.fused_moe._impl")
        k = key(64, experts=16, hidden=1024, inner=256, top_k=2)
        common = dict(topk_ids_dtype=torch.int32, fast_math=True, mac_override=188, quant_mode=b12x.QUANT_MODE)
        sizes = (k.num_experts, 1, k.hidden_size, k.intermediate_size, k.top_k)
        micro = impl._get_micro_kernel(*sizes, single_token=True, device=device, **common)
        sizes = (k.num_experts, 64, k.hidden_size, k.intermediate_size, k.top_k, 64 * k.top_k)
        dynamic = impl._get_dynamic_kernel(*sizes, **common)
        print(json.dumps([micro is not None, dynamic is not None]))
        """,
        tmp_path,
    )
    assert found == [True, True]
