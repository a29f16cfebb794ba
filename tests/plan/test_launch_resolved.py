"""The printed commands behind SGLang's own resolution: it refuses none, and serves what was counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.plan import kv
from sglang_sm120.plan.fits import Fit, Request, fit
from sglang_sm120.plan.gpus import find
from sglang_sm120.plan.launch import PLACEHOLDER, launch
from sglang_sm120.plan.shapes import read_shape
from sglang_sm120.plan.splits import Candidate, candidates, obstacles
from sglang_sm120.plan.workspaces import DRAFT_TOKENS
from tests.plan.conftest import Case

MODELS = (
    ("glm-5-nvfp4", 1), ("glm-5-nvfp4", 2), ("deepseek-v3.2", 1), ("glm-4.7", 1), ("qwen3-30b-a3b-nvfp4", 1),
    ("qwen3.5-397b-a17b-nvfp4", 1), ("minimax-m2.7-nvfp4", 1),
)  # fmt: skip
REQUESTS = 10


@pytest.fixture(scope="module")
def asked() -> list[tuple[str, bool, Candidate, Fit, list[str]]]:
    """Every split of eight GPUs a node that nothing rules out: model, MTP, split, accounting, command."""
    found = []
    for model, nodes in MODELS:
        shape = read_shape(model)
        kv_dtype = "fp8_e4m3" if shape.attention.kind == "dsa" else "bfloat16"
        for mtp in (False, True) if shape.mtp_layers else (False,):
            request = Request(32768, (REQUESTS,), kv_dtype, mtp, find("rtx-pro-6000"))
            for candidate in candidates(8, nodes):
                if not obstacles(shape, candidate, mtp):
                    held = fit(shape, candidate, request, REQUESTS)
                    words = launch(PLACEHOLDER, shape, candidate, held, request.gpu).argv(0)[2:]
                    found.append((model, mtp, candidate, held, [word for word in words if "sm120" not in word]))
    return found


@pytest.fixture(scope="module")
def answers(asked: list[tuple[str, bool, Candidate, Fit, list[str]]]) -> list[dict[str, Any]]:
    """What SGLang makes of each."""
    told = [{"config": Case(model, read_shape(model).num_layers, c.split).config, "argv": words}
            for model, _, c, _, words in asked]  # fmt: skip
    environment = {
        **os.environ, "SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_EMULATE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sglang_resolves.py"))],
        input=json.dumps(told), capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def test_sglang_refuses_no_command_and_serves_what_was_counted(
    asked: list[tuple[str, bool, Candidate, Fit, list[str]]], answers: list[dict[str, Any]]
) -> None:
    assert len(asked) == len(answers) > 60
    for (model, mtp, candidate, held, words), found in zip(asked, answers, strict=True):
        told = f"{model}, {candidate.label}: {' '.join(words)}"
        assert "error" not in found, f"{told}: {found['error']}"
        shape, split = read_shape(model), candidate.split
        sizes = [found[f"{name}_size"] for name in ("tp", "ep", "pp", "dp", "attn_dp")]
        assert sizes == [split.tp, split.ep, split.pp, candidate.replicas, split.dp_attention], told
        assert found["nnodes"] == split.nodes, told
        assert found["page_size"] == kv.page_size(shape), told
        assert found["chunked_prefill_size"] == held.serving.chunked_prefill, told
        assert found["max_running_requests"] == held.running_flag, told
        assert found["mem_fraction_static"] == pytest.approx(held.mem_fraction, abs=5e-4), told
        assert (found["kv_cache_dtype"], found["context_length"]) == (held.serving.kv_dtype, 32768), told
        assert found["speculative_num_draft_tokens"] == (DRAFT_TOKENS if mtp else None), told
        if shape.quantization.experts == "nvfp4":
            assert found["moe_runner_backend"] == "flashinfer_cutlass", told
        states = kv.STATE_SLOTS_A_REQUEST * held.running_flag if shape.attention.linear else None
        assert found["max_mamba_cache_size"] == states, told
