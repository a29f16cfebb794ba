"""SGLang's own models of every family, built once, with which weights and KV cache are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.plan import catalogue
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.shapes import ModelShape
from sglang_sm120.plan.shapes_config import shape_of

# What SGLang's models read of a config beside sizes.
_BESIDE_SIZES = {
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "partial_rotary_factor": 0.5, "decoder_sparse_step": 1, "rotary_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model of the catalogue with fewer layers, and a split. mtp: its MTP head instead of it."""

    model: str
    layers: int
    split: Split
    kv_dtype: str = "bfloat16"
    mtp: bool = False
    draft_layers: int = 0
    args: tuple[tuple[str, Any], ...] = ()
    changes: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def id(self) -> str:
        """Short."""
        split = self.split
        head = "-mtp" if self.mtp else "-drafts" if self.draft_layers else ""
        return f"{self.model}-tp{split.tp}-ep{split.ep}-dp{split.dp_attention}{head}"

    @property
    def config(self) -> dict[str, Any]:
        """The catalogue's config, shortened."""
        config = {**_BESIDE_SIZES, **catalogue.config_of(self.model), **dict(self.changes)}
        nested = config.get("text_config")
        rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
        if nested:
            config["text_config"] = {**nested, "num_hidden_layers": self.layers, "rope_parameters": rope}
        else:
            config["num_hidden_layers"] = self.layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: self.layers]
        quantization = config.get("quantization_config") or {}
        if quantization.get("quant_method") == "fp8":
            config["quantization_config"] = {**quantization, "activation_scheme": "dynamic"}
        return {key: value for key, value in config.items() if value is not None}

    @property
    def shape(self) -> ModelShape:
        """As the plan reads it."""
        return shape_of(self.config, name=self.model, source="a test")

    def told(self) -> dict[str, Any]:
        """As the child reads it."""
        split = self.split
        return {
            "config": self.config, "tp": split.tp, "ep": split.ep, "dp": split.dp_attention, "mtp": self.mtp,
            "kv_dtype": self.kv_dtype, "draft_layers": self.draft_layers, "args": dict(self.args),
        }  # fmt: skip


_CUTLASS = (("moe_runner_backend", "flashinfer_cutlass"),)
# SGLang names Qwen3.5's projections without self_attn, and so an export that leaves them out has to say both.
_QWEN35_IGNORED = (
    "quantization_config",
    {
        "quant_method": "modelopt", "quant_algo": "NVFP4",
        "ignore": ["lm_head", "*self_attn*", "*qkv_proj*", "*o_proj*", "*linear_attn*", "*shared_expert*"],
    },
)  # fmt: skip


def _experts_only(dense: int) -> tuple[tuple[str, Any], ...]:
    """NVFP4 for routed experts alone. dense: layers without experts."""
    ignored = ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.shared_experts*"]
    ignored += [f"model.layers.{layer}.*" for layer in range(dense)]
    return (("quantization_config", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}),)


_HYBRID = (("mamba_radix_cache_strategy", "no_buffer"), ("disable_overlap_schedule", True))

CASES = [
    Case("glm-5-nvfp4", 5, Split(8), args=_CUTLASS),
    Case("glm-5-nvfp4", 5, Split(8, ep=8), "fp8_e4m3", args=_CUTLASS),
    Case("glm-5-nvfp4", 5, Split(8, ep=8, dp_attention=2), "fp8_e4m3", args=_CUTLASS),
    Case("glm-5-nvfp4", 5, Split(8, dp_attention=8), "fp8_e4m3", args=_CUTLASS),
    Case("glm-5-nvfp4", 5, Split(8), "fp8_e4m3", draft_layers=1, args=_CUTLASS),
    Case("glm-5-nvfp4", 78, Split(8), mtp=True, args=_CUTLASS),
    Case("glm-5-fp8", 78, Split(8), mtp=True),
    Case("glm-4.5", 92, Split(8), mtp=True),
    Case("deepseek-v3", 61, Split(8), mtp=True),
    Case("glm-5-fp8", 5, Split(4)),
    Case("glm-5.2-nvfp4", 9, Split(8), "fp8_e4m3", args=_CUTLASS),
    Case("glm-4.5", 5, Split(8)),
    Case("glm-4.5", 5, Split(16), args=_CUTLASS, changes=_experts_only(3)),
    Case("glm-4.5", 5, Split(8, dp_attention=4)),
    Case("glm-4.5-air", 5, Split(4, ep=4), "fp8_e4m3"),
    Case("deepseek-v3", 5, Split(8)),
    Case("deepseek-v3", 5, Split(8), draft_layers=1),
    Case("deepseek-v3", 5, Split(8, dp_attention=2)),
    Case("deepseek-v3.2", 5, Split(8), "fp8_e4m3"),
    Case("kimi-k2", 5, Split(8), args=_CUTLASS, changes=_experts_only(1)),
    Case("qwen3-30b-a3b", 5, Split(2)),
    Case("qwen3-30b-a3b-nvfp4", 5, Split(8), args=_CUTLASS),
    Case("qwen3-30b-a3b-nvfp4", 5, Split(8, ep=8, dp_attention=8), args=_CUTLASS),
    Case("qwen3-235b-a22b", 5, Split(16, dp_attention=2)),
    Case("qwen3-235b-a22b", 5, Split(4, ep=4), args=_CUTLASS, changes=_experts_only(0)),
    Case("qwen3.5-397b-a17b", 8, Split(8), args=_HYBRID),
    Case("qwen3.5-397b-a17b", 8, Split(8, dp_attention=4), args=_HYBRID),
    Case("qwen3.5-397b-a17b-nvfp4", 8, Split(4), args=(*_CUTLASS, *_HYBRID), changes=(_QWEN35_IGNORED,)),
    Case("minimax-m2", 5, Split(4)),
    Case("minimax-m2", 5, Split(4, dp_attention=2)),
    Case("minimax-m2.7-nvfp4", 5, Split(8), args=_CUTLASS),
    # SGLang registers MXFP4 on a GPU only: its tensors are compared in BF16.
    Case("gpt-oss-20b", 4, Split(2), args=(("attention_backend", "triton"),), changes=(("quantization_config", None),)),
    Case(
        "gpt-oss-20b",
        4,
        Split(4, dp_attention=2),
        args=(("attention_backend", "triton"),),
        changes=(("quantization_config", None),),
    ),
]


# What SGLang refuses: sizes that do not divide, and parts that are not whole blocks of scales.
REFUSED = [
    Case("minimax-m2", 3, Split(8)),
    Case("minimax-m2", 3, Split(2), changes=(("head_dim", 64), ("rotary_dim", 32), ("num_key_value_heads", 2))),
    Case("deepseek-v3", 4, Split(32)),
    Case("glm-4.5-air", 3, Split(12)),
    Case("glm-4.5", 3, Split(36)),
    Case("qwen3.5-397b-a17b", 4, Split(32), args=_HYBRID),
    Case("qwen3-30b-a3b", 3, Split(16), changes=(("num_experts", 8),)),
]


@pytest.fixture(scope="session")
def sglang_built() -> dict[str, dict[str, Any]]:
    """What SGLang says of every case, by its id."""
    environment = {
        **os.environ, "SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_EMULATE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    cases = [*CASES, *REFUSED]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sglang_models.py"))],
        input=json.dumps([case.told() for case in cases]), capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip([case.id for case in cases], json.loads(done.stdout.strip().splitlines()[-1]), strict=True))
