"""`sglang-sm120 plan` as a person types it: exit statuses, errors in one piece, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.cli import main
from sglang_sm120.plan import gpus
from sglang_sm120.plan.launch import PLACEHOLDER
from sglang_sm120.plan.run import served_as

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    return tmp_path


def test_a_folder_and_its_config_give_the_same_plan_and_the_folder_is_served(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_folder = run(capsys, str(folder), "--gpus", "2", "--json", "--context", "32k")
    by_file = run(capsys, str(folder / "config.json"), "--gpus", "2", "--json", "--context", "32k")
    assert by_folder == by_file
    assert by_folder[0] == 0
    record = json.loads(by_folder[1])
    assert record["latency"]["argv"][0][:3] == ["sglang", "serve", str(folder)]
    assert "--quantization" not in record["latency"]["argv"][0], "BF16"


def test_what_is_served() -> None:
    assert served_as("glm-5-nvfp4") == PLACEHOLDER


def test_the_context_is_the_models_where_that_is_less(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(run(capsys, str(folder), "--json")[1])
    assert record["context"] == 40960


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no MODEL"),
        (("no-such-model-anywhere",), "no-such-model-anywhere"),
        (("glm-5-nvpf4",), "glm-5-nvfp4"),
        (("glm-5-nvfp4", "--gpu", "rtx-6090"), "unknown GPU"),
        (("glm-5-nvfp4", "--gpus", "0"), "--gpus 0"),
        (("glm-5-nvfp4", "--gpus=-1"), "--gpus -1"),
        (("glm-5-nvfp4", "--gpus", "1000000000"), "1 to 64"),
        (("glm-5-nvfp4", "--context", "0"), "--context 0"),
        (("glm-5-nvfp4", "--context", "3x"), "--context 3x"),
        (("glm-5-nvfp4", "--context", "1000000000000"), "16,777,216"),
        (("glm-5-nvfp4", "--context", "8m"), "the model was made for"),
        (("qwen3-30b-a3b-nvfp4", "--mtp"), "no MTP head"),
    ],
)
def test_bad_input_is_one_error_and_status_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 3, err
    assert "needed:" in err
    assert "fix:" in err


def test_a_folder_without_config_and_a_broken_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, str(tmp_path))
    assert status == 2
    assert "config.json" in err
    (tmp_path / "config.json").write_text(json.dumps(MOE)[:100])
    status, _, err = run(capsys, str(tmp_path))
    assert status == 2
    assert "Traceback" not in err


def test_an_unknown_architecture_is_counted_in_part_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(
        json.dumps({**MOE, "architectures": ["NobodysMoeForCausalLM"], "model_type": "x"})
    )
    status, out, err = run(capsys, str(folder), "--context", "8k")
    assert err == ""
    assert status in (0, 1)
    assert "Not counted" in out
    assert "NobodysMoeForCausalLM" in out


def test_detect_without_a_gpu_is_one_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(gpus.subprocess, "run", missing)
    status, out, err = run(capsys, "glm-5-nvfp4", "--gpu", "detect")
    assert (status, out) == (2, "")
    assert "no nvidia-smi" in err


def test_detect_plans_for_what_is_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887, 12.0\n"
    monkeypatch.setattr(gpus, "_run", lambda command: line * 2)
    record = json.loads(run(capsys, "qwen3-30b-a3b-nvfp4", "--gpu", "detect", "--json")[1])
    assert (record["gpus"], record["gpu"]["name"]) == (2, "rtx-pro-6000")
    record = json.loads(run(capsys, "qwen3-30b-a3b-nvfp4", "--gpu", "detect", "--gpus", "4", "--json")[1])
    assert record["gpus"] == 4
    assert "lists 2" in record["gpu"]["note"]


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--list")
    assert (status, err) == (0, "")
    assert "glm-5-nvfp4" in out
    assert "rtx-pro-6000-max-q" in out
    listed = json.loads(run(capsys, "--list", "--json")[1])
    (model,) = [model for model in listed["models"] if model["name"] == "glm-5-nvfp4"]
    assert (model["layers"], model["experts"]) == (78, 256)
    (gpu,) = [gpu for gpu in listed["gpus"] if gpu["name"] == "rtx-pro-6000"]
    assert gpu["l2_bytes"] == 128 << 20


def test_planning_needs_neither_torch_nor_sglang_nor_rich() -> None:
    code = (
        "import sys; from sglang_sm120.cli import main; status = main(['plan', 'glm-5-nvfp4', '--json']); "
        "heavy = ('torch', 'sglang', 'numpy', 'rich', 'matplotlib'); "
        "print(status, [name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "0 []\n"
    assert json.loads(done.stdout)["format"]
