"""Real servers of two ranks: every token as without our all-reduce, which really served; and what stops or is left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from sglang_sm120.testing.checkpoints import MODEL_STYLES, ReferenceModel
from sglang_sm120.testing.server import SglangServer
from tests.e2e.conftest import ON_GPU, PROMPTS, SERVER_ARGS, assert_same_tokens
from tests.e2e.test_refusals import refused

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none"),
]

ONE_RANK = [*SERVER_ARGS, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a16"]
TWO_RANKS = [*ONE_RANK, "--tp", "2"]
ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
SET_UP = "sglang-sm120: all-reduce over 2 ranks: "
FUSED = "sglang-sm120: first fused all-reduce: "
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs GPUs: on the CPU plain torch stands in for the kernels")


def of_all_reduce(server: SglangServer) -> list[str]:
    return [line for line in server.our_lines() if "all-reduce" in line and " is there; not needed: " not in line]


def compare(server: SglangServer, plain: Path) -> None:
    answers = server.generate(PROMPTS, max_new_tokens=16, return_logprob=True)
    assert_same_tokens(answers, ReferenceModel(plain), PROMPTS)


@pytest.mark.parametrize("style", MODEL_STYLES)
def test_auto_fuses_and_every_token_is_the_references(style: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, "modelopt")
    with SglangServer(nvfp4, TWO_RANKS, env=ENV) as server:
        compare(server, plain)
        lines = of_all_reduce(server)
    assert sum(line.startswith(SET_UP) for line in lines) == 1, "said by the first rank for all"
    assert sum(line.startswith(FUSED) for line in lines) == 2, lines
    assert len(lines) == 3, lines


@gpu_only
@pytest.mark.parametrize("family", ["one-shot", "two-shot"])
def test_a_family_by_name(family: str, checkpoints) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    with SglangServer(nvfp4, [*TWO_RANKS, "--sm120-all-reduce", family], env=ENV) as server:
        compare(server, plain)
        fused = [line for line in of_all_reduce(server) if line.startswith(FUSED)]
    assert len(fused) == 2
    assert all(f" by {family}-" in line for line in fused)


def test_off_leaves_sglang_untouched(checkpoints) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    with SglangServer(nvfp4, [*TWO_RANKS, "--sm120-all-reduce", "off"], env=ENV) as server:
        compare(server, plain)
        assert not of_all_reduce(server)


def test_what_is_not_covered_is_left_to_sglang_with_one_line(checkpoints) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    env = {**ENV, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with SglangServer(nvfp4, TWO_RANKS, env=env) as server:
        compare(server, plain)
        (line,) = of_all_reduce(server)
    assert line.startswith("sglang-sm120: all-reduce left to SGLang: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True;")


def test_a_choice_by_name_that_cannot_serve_stops_before_weights_load(checkpoints) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    log = refused(nvfp4, [*ONE_RANK, "--sm120-all-reduce", "two-shot"])
    assert "--sm120-all-reduce two-shot: one tensor-parallel rank has nothing to sum" in log
    if not ON_GPU:
        for choice in ("one-shot", "stock"):
            log = refused(nvfp4, [*TWO_RANKS, "--sm120-all-reduce", choice], ENV)
            assert f"--sm120-all-reduce {choice}: this machine has no CUDA GPU" in log
            assert "drop --sm120-all-reduce" in log


_PLUGIN = """
import os

def register():
    from sglang_sm120.integration.all_reduce_plane import GpuPlane, HostPlane
    from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import PeerLostError

    def check(self):
        if self.group.rank_in_group == 1 and os.path.exists(os.environ["SM120_LOSE_PEER"]):
            raise PeerLostError("rank 1 waited 60 s for a signal of rank 0", "a rank that is alive", "look at its log")

    GpuPlane.check = HostPlane.check = check
"""


def test_a_lost_peer_ends_the_server_with_its_reason(checkpoints, tmp_path: Path) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    (tmp_path / "sm120_lose_peer.py").write_text(_PLUGIN)
    info = tmp_path / "sm120_lose_peer-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sm120-lose-peer\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nsm120_lose_peer = sm120_lose_peer:register\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    lost = tmp_path / "lost"
    # SGLang waits a minute for core dumps of CUDA before it ends.
    env = {**ENV, "PYTHONPATH": path, "SM120_LOSE_PEER": str(lost), "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}
    with SglangServer(nvfp4, TWO_RANKS, env=env) as server:
        assert server.generate(PROMPTS[0], max_new_tokens=4)["output_ids"]
        lost.touch()
        deadline = time.monotonic() + 60
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not server.alive()
        log = server.log()
    assert "sglang-sm120: rank 1 waited 60 s for a signal of rank 0" in log
    assert "SIGQUIT received" in log
