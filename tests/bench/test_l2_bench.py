"""`sglang-sm120 bench l2` as far as it goes without a GPU: shapes, the step, the command, its options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from l2_fakes import CPU, SMALL, SMALL_GQA, FakeDevice, FakePrefetcher
from rich.console import Console
from torch import Tensor

from sglang_sm120.bench import l2, l2_cases, l2_projections
from sglang_sm120.bench.l2_cases import CANDIDATES, Batch, Stack
from sglang_sm120.bench.l2_options import STACKS, L2BenchOptions, StackShape
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "gpu": "Test GPU", "capability": "9.0", "multiprocessors": 4, "memory_bytes": 1 << 34, "l2_bytes": 1 << 16,
    "driver": "1.2", "torch": "2.0", "cuda": "13.0", "triton": "3.0", "python": "3.11",
}  # fmt: skip
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a machine without a CUDA GPU only")


@pytest.fixture(autouse=True)
def _little_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_projections, "PAST_BYTES", 1 << 12)


# ---- shapes ----
def test_the_bytes_of_the_models_layers() -> None:
    """By hand, from the shapes of a rank in bfloat16; experts at 9 bytes for 16 elements."""
    glm5 = 2624 * 6144 + 2048 * 2048 + 6144 * 2048 + 8 * 192 * 512 + 8 * 512 * 256 + (256 + 512 + 256) * 6144
    deepseek = 2112 * 7168 + 3072 * 1536 + 7168 * 2048 + 2 * 16 * 128 * 512 + (256 + 512 + 256) * 7168
    qwen3 = 2304 * 4096 + 4096 * 2048 + 128 * 4096
    got = {name: stack.dense_bytes() for name, stack in STACKS.items()}
    assert got == {"glm5-tp8": 2 * glm5, "deepseek-v3-tp8": 2 * deepseek, "qwen3-235b-tp4": 2 * qwen3}
    assert STACKS["glm5-tp8"].projections()["o_proj"] == (6144, 2048)
    assert STACKS["glm5-tp8"].expert_bytes() == 3 * 256 * 6144 // 2 + 3 * 256 * 6144 // 16


def test_layers_between_two_uses() -> None:
    """Qwen3 reads 2 * 18,350,080 dense and 8 * 2,654,208 expert bytes a layer: 57.9 MB; 5 * 128 MiB are 671.1 MB."""
    qwen3 = STACKS["qwen3-235b-tp4"]
    assert qwen3.step_bytes(1) == 36_700_160 + 21_233_664
    assert qwen3.layers_needed(128 << 20) == 12 + 1
    assert l2.check_layers(L2BenchOptions(), 128 << 20)["qwen3-235b-tp4"] == 13
    assert set(l2.check_layers(L2BenchOptions(), 60 << 20).values()) == {8}
    with pytest.raises(ConfigError, match="--layers 8: of qwen3-235b-tp4 they read 442 MB") as error:
        l2.check_layers(L2BenchOptions(layers=8), 128 << 20)
    assert error.value.needed.startswith("13 layers")
    assert "--layers 13" in error.value.fix


# ---- the step ----
@pytest.mark.parametrize("shape", [SMALL, SMALL_GQA], ids=["mla", "gqa"])
def test_every_phase_fetches_what_comes_next(shape: StackShape) -> None:
    stack, batch = Stack(shape, 3, CPU, 0), Batch(shape, 3, 2, 16, CPU, 0)

    def ranges(layer: int, *names: str) -> list[tuple[int, int]]:
        dense = stack.layers[layer].dense
        return [(dense[name].data_ptr(), 2 * dense[name].numel()) for name in names]

    before = ("fused_qkv_a_proj", "q_b_proj", "w_kc") if shape is SMALL else ("qkv_proj",)
    ffn = ("router", "shared_gate_up", "shared_down") if shape is SMALL else ("router",)
    want = {
        "attention": [ranges(layer, "o_proj") for layer in (0, 1, 2)],
        "ffn": [ranges(layer, *ffn) for layer in (0, 1, 2)],
        "next": [ranges(layer, *before) for layer in (1, 2, 0)],
    }
    want["prefetch"] = [part for both in zip(want["ffn"], want["next"], strict=True) for part in both]
    plain, none = stack.step(batch, lambda: None)
    assert none == 0
    for candidate, wanted in want.items():
        prefetcher, events = FakePrefetcher(), []
        x, asked = stack.step(
            batch, lambda to=events: to.append("wait"), prefetcher, CANDIDATES[candidate].phases, {"max_bytes": 10}
        )
        assert prefetcher.log == wanted
        assert prefetcher.how == {"max_bytes": 10}
        assert not prefetcher.open, "a capture needs a join behind its last fork"
        assert asked == sum(num_bytes for some in wanted for _, num_bytes in some)
        assert events == ["wait"] * 6
        assert torch.equal(x, plain)


def test_a_prefetch_for_an_all_reduce_is_asked_for_before_it_waits_and_joined_at_the_end() -> None:
    stack, batch = Stack(SMALL, 3, CPU, 0), Batch(SMALL, 3, 2, 16, CPU, 0)
    for candidate, want in (
        ("ffn", [1, 1, 2, 2, 3, 3]),
        ("next", [0, 1, 1, 2, 2, 3]),
        ("attention", [1, 1, 2, 2, 3, 3]),
        ("prefetch", [1, 2, 3, 4, 5, 6]),
    ):
        prefetcher, forks, joined = FakePrefetcher(), [], []

        def wait(p: FakePrefetcher = prefetcher, forks: list[int] = forks, joined: list[bool] = joined) -> None:
            forks.append(len(p.log))
            joined.append(bool(p.log) and not p.open)

        stack.step(batch, wait, prefetcher, CANDIDATES[candidate].phases)
        assert forks == want, candidate
        assert not any(joined), "the main stream waits for the side stream once, behind the last layer"
        assert not prefetcher.open


def test_windows_cover_what_the_plan_keeps_or_everything() -> None:
    """The bytes are by hand: rows times columns times 2."""
    stack = Stack(SMALL, 2, CPU, 0)
    sizes = {"fused_qkv_a_proj": 53248, "q_b_proj": 6144, "o_proj": 24576, "router": 4096, "shared_gate_up": 65536,
             "shared_down": 32768}  # fmt: skip
    dense = [layer.dense for layer in stack.layers]
    assert {name: dense[0][name].nbytes for name in sizes} == sizes

    def at(layer: int, *names: str) -> set[int]:
        return {dense[layer][name].data_ptr() for name in names}

    kept = stack.windows("kept", 53248 + 6144 + 4096 + 4095)
    assert kept == dict.fromkeys(at(0, "fused_qkv_a_proj", "q_b_proj", "router"), 1.0), (
        "o does not fit; no absorbed ones"
    )
    assert stack.windows("kept", sum(sizes.values()) + 6144).keys() == at(0, *sizes) | at(1, "q_b_proj")
    assert stack.windows("all", sum(sizes.values())) == dict.fromkeys(at(0, *sizes) | at(1, *sizes), 0.5)
    assert stack.windows(None, 1 << 20) == {}


def test_what_windows_keep_is_not_fetched() -> None:
    stack, batch = Stack(SMALL, 2, CPU, 0), Batch(SMALL, 2, 2, 16, CPU, 0)
    whole, part = FakePrefetcher(), FakePrefetcher()
    phases = CANDIDATES["both"].phases
    stack.step(batch, lambda: None, whole, phases)
    kept = [stack.layers[0].dense["router"].data_ptr(), *(address for address, _ in stack.layers[1].ranges("ffn"))]
    _, asked = stack.step(batch, lambda: None, part, phases, without=kept)
    left = [[one for one in some if one[0] not in kept] for some in whole.log]
    assert part.log == [some for some in left if some], "no fork without anything to fetch"
    assert len(part.log) == 3
    assert asked == sum(num_bytes for some in part.log for _, num_bytes in some)


def test_every_projection_and_no_other_weight_is_multiplied_by_the_given_linear() -> None:
    for shape in (SMALL, SMALL_GQA):
        stack, batch, seen = Stack(shape, 2, CPU, 0), Batch(shape, 2, 2, 16, CPU, 0), []

        def linear(x: Tensor, weight: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(weight.data_ptr())
            return torch.nn.functional.linear(x, weight)

        got, _ = stack.step(batch, lambda: None, linear=linear)
        every = [p.weight.data_ptr() for layer in stack.layers for p in layer.projections().all()]
        assert sorted(seen) == sorted(every)
        assert torch.equal(got, stack.step(batch, lambda: None)[0])


def test_attention_is_attention() -> None:
    """Against torch's own, over the cache that the step reads."""
    stack, batch = Stack(SMALL_GQA, 2, CPU, 0), Batch(SMALL_GQA, 2, 3, 16, CPU, 0)
    layer, hidden = stack.layers[0], batch.hidden
    got = stack._attention(layer, hidden, batch.caches[0], lambda: None)
    q = (hidden @ layer.dense["qkv_proj"].T)[:, : 4 * 32].view(3, 4, 1, 32).float()
    keys, values = (part.repeat_interleave(2, 1).float() for part in batch.caches[0].chunk(2))
    heads = torch.nn.functional.scaled_dot_product_attention(q, keys, values).reshape(3, -1)
    want = heads @ layer.dense["o_proj"].T.float()
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.02)


def test_weights_and_routings_differ_from_layer_to_layer() -> None:
    stack, batch = Stack(SMALL, 2, CPU, 0), Batch(SMALL, 2, 16, 16, CPU, 0)
    for name, weight in stack.layers[0].dense.items():
        assert not torch.equal(weight, stack.layers[1].dense[name])
    assert not torch.equal(batch.ids[0], batch.ids[1])
    assert not torch.equal(batch.caches[0], batch.caches[1])
    active = batch.active_experts()
    total = 2 * SMALL.dense_bytes() + active * 3 * 128 * 256 * 9 // 16 + 2 * 16 * 16 * 40 * 2
    assert stack.reuse_bytes(batch) == total - total // 2


# ---- the command ----
def measured(tmp_path: Path, **options: Any) -> dict[str, Any]:
    chosen = {"models": (SMALL, SMALL_GQA), "tokens": (1, 2), "wait_us": (5.0,), "context": 8, "repeat": 7, **options}
    console = Console(width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    return l2.measure_all(L2BenchOptions(**chosen, json=str(tmp_path / "l2.json")), console, MACHINE, FakeDevice())


def test_everything_is_measured_and_written(tmp_path: Path) -> None:
    results = measured(tmp_path, budget_bytes=12345, blocks=7, captures=1)
    assert json.loads((tmp_path / "l2.json").read_text()) == results
    assert [(point["model"], point["tokens"]) for point in results["steps"]] == [("small", 1), ("small", 2)] * 2
    names = [point["name"] for point in results["projections"] if point["tokens"] == 1]
    assert names == [point["name"] for point in results["projections"] if point["tokens"] == 2]
    assert names == ["fused_qkv_a_proj", "q_b_proj", "o_proj", "router", "shared_gate_up", "shared_down",
                     "qkv_proj", "o_proj", "router"]  # fmt: skip
    assert (results["budget_bytes"], results["blocks"]) == (12345, 7)


def test_the_default_budget_is_a_quarter_of_l2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    right = l2_cases.Stack.step

    def step(self: Stack, *args: Any) -> tuple[Tensor, int]:
        seen.append(args[4])
        return right(self, *args)

    monkeypatch.setattr(Stack, "step", step)
    results = measured(tmp_path, models=(SMALL_GQA,), tokens=(1,), captures=1)
    assert results["budget_bytes"] == (1 << 16) // 4
    assert all(how == {"max_bytes": (1 << 16) // 4} for how in seen)


@needs_no_gpu
def test_without_a_gpu_there_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "l2"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 3
    assert "a CUDA GPU" in error
    assert "--from-json" in error


def parse(*arguments: str) -> L2BenchOptions:
    seen: list[L2BenchOptions] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(l2, "run", lambda options: seen.append(options) or 0)
        assert main(["bench", "l2", *arguments]) == 0
    return seen[0]


def test_options() -> None:
    assert parse() == L2BenchOptions()
    got = parse(
        "--model", "glm5-tp8", "qwen3-235b-tp4", "--tokens", "1", "4,8", "--wait-us", "0", "2.5", "--layers", "20",
        "--context", "128", "--budget-mb", "1.5", "--blocks", "16", "--captures", "5", "--repeat", "11", "--seed", "3",
        "--json", "j", "--markdown", "m", "--plot", "p.png",
    )  # fmt: skip
    assert got == L2BenchOptions(
        (STACKS["glm5-tp8"], STACKS["qwen3-235b-tp4"]), (1, 4, 8), (0.0, 2.5), 20, 128, 3 << 19, 16, 5, 11, 3, "j",
        None, "m", "p.png",
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [("--model", "glm6"), ("--tokens", "0"), ("--wait-us", "-1"), ("--wait-us", "nan"), ("--layers", "1"),
     ("--context", "0"), ("--budget-mb", "0"), ("--budget-mb", "x"), ("--blocks", "1025"), ("--captures", "0"),
     ("--repeat", "6")],
)  # fmt: skip
def test_a_wrong_option_is_refused_and_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_options_load_without_anything_installed() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.bench.l2_options; "
    code += "print({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
