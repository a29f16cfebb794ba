"""The server of a patched SGLang uses the doors that the patches add, and answers as with our hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_sm120.integration.hooks import HOOKS, Stage
from sglang_sm120.testing.checkpoints import ReferenceModel
from sglang_sm120.testing.server import SglangServer
from tests.e2e.conftest import ATOL, ON_GPU, PROMPTS, SERVER_ARGS, assert_same_tokens
from tests.patched_sglang import patched_copy

pytestmark = pytest.mark.e2e


def test_our_runner_through_the_doors(checkpoints, tmp_path: Path) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    tree = patched_copy(tmp_path / "patched")
    args = [*SERVER_ARGS, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a16"]
    two_ranks = not ON_GPU or torch.cuda.device_count() > 1
    if two_ranks:
        args += ["--tp", "2"]
    env = {"PYTHONPATH": str(tree), **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if two_ranks else {})}
    with SglangServer(nvfp4, args, env=env) as server:
        answers = server.generate(PROMPTS, max_new_tokens=16, return_logprob=True)
        assert_same_tokens(answers, ReferenceModel(plain), PROMPTS, atol=ATOL)
        assert {name: value for name, value in server.info().items() if "sm120" in name} == {
            "enable_sm120_opts": True,
            "sm120_moe_backend": "reference",
            "sm120_moe_numerics": "w4a16",
            "sm120_moe_profile": "",
            "sm120_all_reduce": "auto",
            "sm120_all_reduce_profile": "",
            "sm120_l2": "off",
            "sm120_l2_prefetch_mb": "",
            "sm120_l2_persist_mb": "",
            "sm120_verify": "auto",
            "sm120_emulate": True,
        }
        log = server.our_lines()
        assert any("MoE runners of 2 of 2 layers of the model: reference w4a16 for every batch" in line for line in log)
        doors = {hook.door for hook in HOOKS if hook.door and (two_ranks or hook.stage is not Stage.ALL_REDUCE)}
        assert len(doors) == 6 + two_ranks
        for door in doors:
            assert any(line.startswith(f"sglang-sm120: {door} is there; ") for line in log), log
        fused = [line for line in log if line.startswith("sglang-sm120: first fused all-reduce: ")]
        assert len(fused) == (2 if two_ranks else 0)
