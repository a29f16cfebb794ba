"""`sglang-sm120 plan` on files and options that make no sense: one error or a partial answer, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_sm120.cli import main
from sglang_sm120.plan import plot

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 2048,
    "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
NAME = "qwen3-30b-a3b-nvfp4"
ODD = ("12", None, 0, -1, 1e30, 10**30, 3.5, "", [], {}, True)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    out = capsys.readouterr()
    return status, out.out, out.err


def plan(capsys: pytest.CaptureFixture[str], folder: Path, config: object, *words: str) -> tuple[int, str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    return run(capsys, str(folder), "--gpus", "2", *words)


def is_one_error(said: str) -> bool:
    lines = said.splitlines()
    return len(lines) == 3 and lines[1].startswith("  needed: ") and lines[2].startswith("  fix: ")


@pytest.mark.parametrize("key", list(MOE))
def test_any_key_may_be_of_any_type(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ODD:
        status, out, err = plan(capsys, tmp_path, {**MOE, key: value}, "--json")
        if status == 2:
            assert out == "", (key, value)
            assert is_one_error(err), (key, value, err)
        else:
            assert err == ""
            assert json.loads(out)["splits"], (key, value)


@pytest.mark.parametrize("quantization", [None, {"quant_method": "modelopt", "quant_algo": "NVFP4"}])
def test_a_model_without_experts(quantization: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = {key: value for key, value in MOE.items() if "expert" not in key and not key.startswith("moe_")}
    dense |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    dense |= {"quantization_config": quantization} if quantization else {}
    status, out, err = plan(capsys, tmp_path, dense)
    assert (status, err) == (0, "")
    assert "LlamaForCausalLM is not known here" in out
    assert "MoE" not in out
    assert "NVFP4 experts" not in out
    assert plan(capsys, tmp_path, dense, "--all")[0] == 0


@pytest.mark.parametrize(
    "quantization",
    [
        [], "fp8", 5, {}, {"quant_method": 5}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"},
        {"quant_method": "modelopt"}, {"quant_method": "modelopt", "quant_algo": 7, "ignore": "x"},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": [1]}}},
        {"quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": [], "type": {}}}}},
        {"quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}},
    ],
)  # fmt: skip
def test_a_quantisation_that_is_not_known_is_counted_in_2_bytes_and_says_so(
    quantization: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = json.loads(plan(capsys, tmp_path, MOE, "--json")[1])
    status, out, err = plan(capsys, tmp_path, {**MOE, "quantization_config": quantization}, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert any("counted in 2 bytes" in said for said in found["model"]["not_counted"]), found["model"]
    assert [one["concurrency"][0]["weight_bytes"] for one in found["splits"]] == [
        one["concurrency"][0]["weight_bytes"] for one in plain["splits"]
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "9" * 400 + "GiB"), "no GPU has that much memory"),
        (("--gpu", ""), "--gpu ''"),
        (("--gpu", "rtx-5090,"), "--gpu ''"),
        (("--gpu", "detect,rtx-5090"), "detect beside others"),
        (("--gpu", "0GiB"), "less than 1 GiB"),
        (("--concurrency", ""), "--concurrency with nothing"),
        (("--concurrency", "1,,2"), "--concurrency with nothing"),
        (("--concurrency", "0"), "1 to 100,000, or several with commas"),
        (("--gpus", ""), "--gpus with nothing"),
        (("--l2", "--plot", "x.png"), "--plot with --l2"),
    ],
)  # fmt: skip
def test_options(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, NAME, *words)
    assert (status, out) == (2, "")
    assert is_one_error(err), err
    assert said in err
    assert len(err) < 1000, err


@pytest.mark.parametrize("json_too", [[], ["--json"]])
@pytest.mark.parametrize(
    ("path", "why"),
    [("", "no file"), (".", "a folder"), ("no/plan.png", "there is no folder no"), ("plan", "formats are"),
     ("plan.what", "formats are")],
)  # fmt: skip
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_printed(
    path: str,
    why: str,
    json_too: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, NAME, "--plot", path, *json_too)
    assert (status, out) == (2, "")
    assert is_one_error(err), err
    assert f"--plot {path!r} cannot be written ({why}" in err
    assert list(tmp_path.iterdir()) == [], "nothing is written under another name"


def test_a_picture_that_fails_at_the_end_does_not_take_the_answer_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def full(record: object, path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plot, "draw", full)
    status, out, err = run(capsys, NAME, "--json", "--plot", str(tmp_path / "plan.png"))
    assert status == 2
    assert json.loads(out)["format"]
    assert is_one_error(err)
    assert "no space left" in err


@pytest.mark.parametrize("words", [["--json"], [], ["--l2"]])
def test_an_answer_that_cannot_be_written_is_one_error(words: list[str]) -> None:
    code = f"import sys; from sglang_sm120.cli import main; sys.exit(main(['plan', {NAME!r}, *{words!r}]))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 2, done.stderr
    assert is_one_error(done.stderr), done.stderr


@pytest.mark.parametrize("words", ["--json", "--all", "--l2 --json"])
def test_a_reader_may_go(words: str) -> None:
    code = f"import sys; from sglang_sm120.cli import main; sys.exit(main(['plan', {NAME!r}, *{words.split()!r}]))"
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 1', sys.executable, code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
