"""The printed commands: SGLang's real parser takes every one, with the values that were counted."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from sglang_sm120 import options
from sglang_sm120.plan import catalogue
from sglang_sm120.plan.choose import Pick, Plan, plan
from sglang_sm120.plan.fits import Request, fit
from sglang_sm120.plan.gpus import find
from sglang_sm120.plan.launch import _OWN_DRAFT, FIRST_NODE, INTERFACE, PLACEHOLDER, Launch, launch
from sglang_sm120.plan.memory import Split
from sglang_sm120.plan.shapes import ModelShape, read_shape
from sglang_sm120.plan.shapes_config import shape_of
from sglang_sm120.plan.splits import Candidate, candidates, obstacles

GLM_5, QWEN = "glm-5-nvfp4", "qwen3-30b-a3b-nvfp4"
REQUEST = Request(65536, (2,), "fp8_e4m3", False, find("rtx-pro-6000"))


@cache
def parser() -> argparse.ArgumentParser:
    """SGLang's own, with this package's flags as the plugin adds them."""
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(prog="sglang serve", allow_abbrev=False)
    ServerArgs.add_cli_args(made)
    options.add_cli_args(made)
    return made


def parse(argv: list[str]) -> Any:
    """As `sglang serve MODEL ...` does: the word behind `serve` is the model's path."""
    assert argv[:2] == ["sglang", "serve"]
    return parser().parse_args(["--model-path", *argv[2:]])


def launched(model: str, candidate: Candidate, number: int = 2, **changes: Any) -> Launch:
    shape, request = read_shape(model), replace(REQUEST, **changes)
    return launch("CHECKPOINT", shape, candidate, fit(shape, candidate, request, number), request.gpu)


def value(made: Launch, name: str) -> str | None:
    return next(flag.value for flag in made.flags if flag.name == name)


@pytest.mark.parametrize("model", [GLM_5, QWEN])
@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpu", ["rtx-pro-6000", "rtx-5090", "h200"])
def test_sglangs_parser_takes_every_command_of_every_split(model: str, mtp: bool, nodes: int, gpu: str) -> None:
    shape = read_shape(model)
    if mtp and not shape.mtp_layers:
        pytest.skip("no MTP head")
    request = replace(REQUEST, gpu=find(gpu), mtp=mtp)
    looked = 0
    for candidate in candidates(8, nodes):
        if obstacles(shape, candidate, mtp):
            continue
        found = fit(shape, candidate, request, 10)
        made = launch("CHECKPOINT", shape, candidate, found, request.gpu)
        for rank in range(nodes):
            args = parse(made.argv(rank))
            assert args.model_path == "CHECKPOINT"
            split = candidate.split
            assert (args.tp_size, args.ep_size, args.pp_size) == (split.tp, split.ep, split.pp)
            assert (args.attn_dp_size, args.dp_size) == (split.dp_attention, candidate.replicas)
            assert (args.nnodes, args.node_rank) == (nodes, rank)
            assert args.context_length == 65536
            assert args.kv_cache_dtype == "fp8_e4m3"
            assert args.mem_fraction_static == pytest.approx(found.mem_fraction, abs=5e-4)
            assert args.cuda_graph_max_bs_decode == found.graph_max_bs
            assert args.enable_sm120_opts is True
            assert args.speculative_algorithm == ("EAGLE" if mtp else None)
            looked += 1
    assert looked >= 4


def test_a_shell_reads_the_printed_command_as_the_words_that_were_parsed() -> None:
    made = replace(launched(GLM_5, Candidate(Split(tp=8))), model="/models/my model's copy")
    script = made.command().replace("sglang serve", "printf '%s\\n' sglang serve", 1)
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == made.argv()
    assert "/models/my model's copy" in words


def test_every_node_has_its_command_and_ray_has_one() -> None:
    made = launched(GLM_5, Candidate(Split(tp=8, pp=2, nodes=2)))
    for rank in (0, 1):
        text = made.command(rank)
        assert f"--node-rank {rank}" in text
        assert f"--dist-init-addr {FIRST_NODE}" in text
        assert f"NCCL_SOCKET_IFNAME={INTERFACE}" in text
        flags = [word for word in made.argv(rank) if word.startswith("--")]
        assert flags == [flag.name for flag in made.settings(rank)]
        assert all(flag.reason for flag in made.settings(rank)), "a reason a flag, those of the node too"
    ray = made.ray()
    assert ray is not None
    words = [word for word in shlex.split(ray.replace("\\\n", " ")) if "=" not in word]
    args = parse(words)
    assert args.use_ray is True
    assert args.nnodes == 2
    assert args.enable_sm120_opts is None, "nothing of this package runs in Ray's actors"
    assert any("plugins" in note for note in made.notes)
    assert any("several nodes" in note for note in made.notes), "the all-reduce is not used, and it says so"
    assert launched(GLM_5, Candidate(Split(tp=8))).ray() is None


def test_ray_actors_load_no_plugins() -> None:
    """What the note on Ray rests on. If SGLang changes it, the command may carry our flags."""
    import sglang.srt

    folder = next(iter(sglang.srt.__path__))
    from pathlib import Path

    files = list((Path(folder) / "ray").glob("*.py"))
    assert any("configure_scheduler_process" in file.read_text() for file in files)
    assert not any("load_plugins" in file.read_text() for file in files)


def test_flags_that_field_reports_ask_for() -> None:
    glm = launched(GLM_5, Candidate(Split(tp=8)))
    assert value(glm, "--quantization") == "modelopt_fp4"
    assert value(glm, "--disable-shared-experts-fusion") is None
    assert "--disable-shared-experts-fusion" not in [flag.name for flag in launched(QWEN, Candidate(Split(tp=2))).flags]
    assert all(flag.reason and "\n" not in flag.reason for flag in (*glm.flags, *glm.environment))


def nvfp4(model: str, **quantization: Any) -> ModelShape:
    """A model of the catalogue with its routed experts in NVFP4 and all else in BF16."""
    ignored = ["lm_head", "*self_attn*", "*shared_expert*", "model.layers.0.*"]
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored, **quantization}
    config = {**catalogue.config_of(model), "quantization_config": declared}
    return shape_of(config, name=model, source="a test")


@pytest.mark.parametrize(("model", "fuses"), [("glm-4.7", True), ("deepseek-v3", True), ("minimax-m2", False)])
def test_a_shared_expert_that_is_not_nvfp4_is_not_fused(model: str, fuses: bool) -> None:
    """GLM-4's class in SGLang fuses whatever the shared expert is stored in."""
    shape, candidate = nvfp4(model), Candidate(Split(tp=8))
    made = launch("CHECKPOINT", shape, candidate, fit(shape, candidate, REQUEST, 1), REQUEST.gpu)
    assert ("--disable-shared-experts-fusion" in made.argv()) is fuses
    parse(made.argv())


def test_mixed_precision_names_the_runner_that_stock_sglang_does_not_take_by_itself() -> None:
    experts = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4"} for layer in range(48)}
    shape = nvfp4("qwen3-30b-a3b", quant_algo="MIXED_PRECISION", quantized_layers=experts)
    assert (shape.quantization.method, shape.quantization.experts) == ("modelopt_mixed", "nvfp4")
    candidate = Candidate(Split(tp=2))
    made = launch("CHECKPOINT", shape, candidate, fit(shape, candidate, REQUEST, 1), REQUEST.gpu)
    assert parse(made.argv()).moe_runner_backend == "flashinfer_cutlass"
    assert "--quantization" not in made.argv()


def test_the_draft_of_an_mtp_head_is_named_where_sglang_does_not_know_it() -> None:
    """SGLang's own list, read from its source: these take the target's checkpoint by themselves."""
    import inspect

    from sglang.srt.arg_groups import speculative_hook

    source = inspect.getsource(speculative_hook._handle_eagle_family)
    before = source[: source.index("speculative_draft_model_path is None")]
    listed = before[before.rindex("model_arch in [") :]
    assert all(f'"{name}"' in listed for name in _OWN_DRAFT)
    made = launched(GLM_5, Candidate(Split(tp=8)), mtp=True)
    assert value(made, "--speculative-algorithm") == "EAGLE"
    assert "--speculative-draft-model-path" not in [flag.name for flag in made.flags]


def test_the_state_of_linear_attention_is_sized_for_the_requests() -> None:
    made = launched("qwen3.5-397b-a17b-nvfp4", Candidate(Split(tp=8, dp_attention=2)), 9)
    args = parse(made.argv())
    assert (args.max_running_requests, args.max_mamba_cache_size) == (10, 50)
    assert "--max-mamba-cache-size" not in launched(GLM_5, Candidate(Split(tp=8))).argv()


def test_attention_dp_is_spelt_as_0_5_23_does() -> None:
    made = launched(GLM_5, Candidate(Split(tp=8, dp_attention=4)), 10)
    assert value(made, "--attn-dp-size") == "4"
    assert "--enable-dp-attention" not in made.argv()
    assert value(made, "--max-running-requests") == "12", "SGLang divides it by 4: 3 each, and 10 are asked for"


def test_p2p_and_other_gpus() -> None:
    pro = launched(GLM_5, Candidate(Split(tp=8)))
    assert pro.environment == (), "what hangs on a broken bus is for people to set"
    assert any("NCCL_P2P_LEVEL=SYS" in note and "bench p2p" in note for note in pro.notes)
    consumer = launched(QWEN, Candidate(Split(tp=2)), gpu=find("rtx-5090"))
    assert consumer.environment == ()
    assert any("no P2P" in note for note in consumer.notes)
    sized = launched(QWEN, Candidate(Split(tp=2)), gpu=find("48GiB"))
    assert sized.environment == ()
    assert any("bench p2p" in note for note in sized.notes)
    hopper = launched(GLM_5, Candidate(Split(tp=8)), gpu=find("h200"))
    assert "--sm120-emulate" in hopper.argv()
    one = launched(QWEN, Candidate(Split(tp=1)))
    assert one.environment == ()


def test_the_placeholder_is_explained() -> None:
    shape = read_shape(QWEN)
    candidate = Candidate(Split(tp=1))
    made = launch(PLACEHOLDER, shape, candidate, fit(shape, candidate, REQUEST, 1), REQUEST.gpu)
    assert any(PLACEHOLDER in note and "folder" in note for note in made.notes)
    assert not any("folder, or its name" in note for note in launched(QWEN, candidate).notes)


def test_picks_can_be_launched() -> None:
    found: Plan = plan(read_shape(GLM_5), replace(REQUEST, concurrency=(1, 1000)), 8)
    for pick in (found.latency, found.throughput):
        assert isinstance(pick, Pick)
        parse(launch("CHECKPOINT", found.shape, pick.candidate, pick.fit, REQUEST.gpu).argv())
