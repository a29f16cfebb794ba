"""Real servers: a table that switches runner by batch size, our kernels under it, and the self-check before it serves.

On the CPU our kernels are their host build. On a GPU they run in SGLang's CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_sm120.runners import profile as profiles
from sglang_sm120.testing.checkpoints import ReferenceModel
from sglang_sm120.testing.server import ServerDied, SglangServer
from tests.e2e.conftest import ON_GPU, PROMPTS, SERVER_ARGS, assert_same_tokens
from tests.e2e.planted import KINDS, planted_environment

pytestmark = pytest.mark.e2e

# Our kernels take half precision, whose step decides near ties.
HALF = [word if word != "float32" else "float16" for word in SERVER_ARGS]
ATOL = 0.1
W4A16 = ["--sm120-moe-numerics", "w4a16"]
FAST_US, SLOW_US = 1.0, 2.0


def write_profile(path: Path, *, few: str, many: str, intermediate: int = 128, experts: int = 8, **machine) -> Path:
    """A profile of this machine by which `few` is the fastest up to 3 tokens, and `many` above."""

    def point(tokens: int, best: str) -> profiles.Point:
        return profiles.Point(
            tokens=tokens,
            candidates=[
                profiles.Candidate(
                    runner=name, numerics="w4a16", samples_us=[FAST_US if name == best else SLOW_US], relative_error=0.0
                )
                for name in ("native", "reference")
            ],
        )

    shape = profiles.Shape(
        num_experts=experts, top_k=2, hidden_size=128, intermediate_size=intermediate, is_gated=True,
        activation="silu", hidden_dtype="float16",
    )  # fmt: skip
    here = profiles.current_machine()
    values = {name: getattr(here, name) for name in here.__struct_fields__} | machine
    layer = profiles.Layer(shape=shape, points=[point(2, few), point(6, many)])
    profile = profiles.Profile(
        format=profiles.FORMAT, created="2026-11-30T00:00:00+00:00", command="by hand",
        machine=profiles.Machine(**values), layers=[layer],
    )  # fmt: skip
    profiles.write(profile, path)
    return path


def line_with(server: SglangServer, text: str) -> str:
    found = [line for line in server.our_lines() if text in line]
    assert len(found) >= 1, server.our_lines()
    return found[0]


def compare(server: SglangServer, plain: Path) -> None:
    reference = ReferenceModel(plain)
    for prompts in ([PROMPTS[0]], PROMPTS, PROMPTS * 3):  # decode batches of 1, 3 and 9, prefills of 7 to 150 tokens
        answers = server.generate(prompts, max_new_tokens=12, return_logprob=True)
        assert_same_tokens(answers, reference, prompts, atol=ATOL)


@pytest.mark.parametrize(("few", "many"), [("native", "reference"), ("reference", "native")])
def test_the_runner_switches_by_batch_size(few: str, many: str, checkpoints, tmp_path: Path) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    profile = write_profile(tmp_path / "profile.json", few=few, many=many)
    with SglangServer(nvfp4, [*HALF, *W4A16, "--sm120-moe-profile", str(profile)]) as server:
        line = line_with(server, "MoE runners of 2 of 2 layers")
        assert f"{few} w4a16 up to 3 tokens, {many} w4a16 above (profile {profile})" in line
        assert "native w4a16 right" in line_with(server, "self-check of 2 MoE layers")
        compare(server, plain)


@pytest.mark.parametrize("style", ["deepseek_v3", "glm4_moe"])
def test_native_by_name(style: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, "compressed-tensors")
    with SglangServer(nvfp4, [*HALF, *W4A16, "--sm120-moe-backend", "native", "--sm120-verify", "strict"]) as server:
        assert "native w4a16 for every batch (--sm120-moe-backend native)" in line_with(server, "MoE runners of ")
        assert "native w4a16 right" in line_with(server, "self-check of ")
        compare(server, plain)


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
@pytest.mark.parametrize("parallel", [["--tp", "2"], ["--tp", "2", "--ep", "2"]], ids=["tp2", "ep2"])
def test_native_on_two_ranks(parallel: list[str], checkpoints) -> None:
    style = "glm4_moe" if "--ep" in parallel else "qwen3_moe"
    nvfp4, plain = checkpoints(style, "modelopt")
    args = [*HALF, *W4A16, "--sm120-moe-backend", "native", *parallel]
    with SglangServer(nvfp4, args, env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        assert sum("native w4a16 for every batch" in line for line in server.our_lines()) == 2
        compare(server, plain)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: SGLang pins memory for DP attention")
def test_the_table_under_dp_attention(checkpoints, tmp_path: Path) -> None:
    """Each rank has requests of its own; the MoE layers see the gathered batch, and all ranks choose by its size."""
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    profile = write_profile(tmp_path / "profile.json", few="native", many="reference", intermediate=64)
    args = [*HALF, *W4A16, "--sm120-moe-profile", str(profile), "--tp", "2", "--dp-size", "2", "--enable-dp-attention"]
    with SglangServer(nvfp4, args) as server:
        assert sum("native w4a16 up to 3 tokens, reference w4a16" in line for line in server.our_lines()) == 2
        compare(server, plain)


# What SGLang does to a forward pass on a GPU only. The table must choose by the size that a graph was captured for.
ON_GPU_ONLY = {
    "prefill graphs": ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-max-bs-prefill", "64"],
    "torch.compile": ["--enable-torch-compile", "--torch-compile-max-bs", "4"],
    "speculative": ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"],
}


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("more", ON_GPU_ONLY.values(), ids=ON_GPU_ONLY)
def test_the_table_under_what_a_gpu_has(more: list[str], checkpoints, tmp_path: Path) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    profile = write_profile(tmp_path / "profile.json", few="native", many="reference")
    base = (
        [word for word in HALF if word != "--disable-prefill-cuda-graph"]
        if "--cuda-graph-backend-prefill" in more
        else HALF
    )
    with SglangServer(nvfp4, [*base, *W4A16, "--sm120-moe-profile", str(profile), *more]) as server:
        assert "native w4a16 up to 3 tokens, reference w4a16 above" in line_with(server, "MoE runners of 2 of 2 layers")
        compare(server, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_runner_is_caught_and_not_served(kind: str, checkpoints, tmp_path: Path) -> None:
    """On auto another one serves, and the answers are right; by name the server stops."""
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    profile = write_profile(tmp_path / "profile.json", few="native", many="native")
    environment = planted_environment(tmp_path, kind)
    args = [*HALF, *W4A16, "--sm120-moe-profile", str(profile)]
    with SglangServer(nvfp4, args, env=environment) as server:
        assert "native w4a16" in line_with(server, "self-check: ")
        assert "native w4a16 WRONG, not used" in line_with(server, "self-check of ")
        compare(server, plain)
    if kind != KINDS[0]:
        return
    for more in (["--sm120-verify", "strict", "--sm120-moe-profile", str(profile)], ["--sm120-moe-backend", "native"]):
        with pytest.raises(ServerDied) as died, SglangServer(nvfp4, [*HALF, *W4A16, *more], env=environment):
            pass
        assert "the self-check failed: " in died.value.log
        assert "fix: " in died.value.log


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"gpu": "NVIDIA RTX PRO 6000 Blackwell"}, "was measured elsewhere: gpu NVIDIA RTX PRO 6000"),
        ({}, "no layer of this shape"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(machine: dict, says: str, checkpoints, tmp_path: Path) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    sizes = {} if machine else {"intermediate": 256}
    profile = write_profile(tmp_path / "profile.json", few="native", many="native", **sizes, **machine)
    with (
        pytest.raises(ServerDied) as died,
        SglangServer(nvfp4, [*HALF, *W4A16, "--sm120-moe-profile", str(profile)]),
    ):
        pass
    assert says in died.value.log
    assert "needed: " in died.value.log
