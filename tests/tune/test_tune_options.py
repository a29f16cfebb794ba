"""The command line of `sglang-sm120 tune`, and the layers that a model and its parallelism come to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.bench.options import MODELS, ModelShape
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError
from sglang_sm120.plan.checkpoint import RoutedExperts, routed_experts
from sglang_sm120.tune import run
from sglang_sm120.tune.options import TOKENS, LayerCase, TuneOptions, rank_layer

ROOT = Path(__file__).resolve().parent.parent.parent
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096, "moe_intermediate_size": 1536,
             "intermediate_size": 12288, "hidden_act": "silu"}  # fmt: skip
DEEPSEEK_V3 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168, "moe_intermediate_size": 2048,
               "intermediate_size": 18432, "hidden_act": "silu", "n_shared_experts": 1}  # fmt: skip
GLM4_MOE = {"n_routed_experts": 160, "num_experts_per_tok": 8, "hidden_size": 5120, "moe_intermediate_size": 1536,
            "intermediate_size": 12288, "hidden_act": "silu"}  # fmt: skip
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 4096, "intermediate_size": 14336,
           "hidden_act": "silu"}  # fmt: skip


def parse(*arguments: str) -> TuneOptions:
    """What the command line comes to, without running it."""
    seen: list[TuneOptions] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "run", lambda options: seen.append(options) or 0)
        assert main(["tune", *arguments]) == 0
    return seen[0]


def folder(path: Path, config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_defaults() -> None:
    assert parse("--model", "glm5-tp8") == TuneOptions(layers=(LayerCase(MODELS["glm5-tp8"]),))
    assert list(TOKENS) == [2**n for n in range(14)]


def test_all_options() -> None:
    options = parse(
        "--model", "glm5-tp8", "16,4,1024,256", "glm5-tp8", "--tokens", "256,1,16", "--numerics", "w4a4", "--runners",
        "native,b12x", "--with-reference", "--repeat", "11", "--seed", "3", "--output", "o.json", "--force",
        "--dry-run", "--plot", "p.png",
    )  # fmt: skip
    assert options == TuneOptions(
        layers=(LayerCase(MODELS["glm5-tp8"]), LayerCase(ModelShape("16,4,1024,256", 16, 4, 1024, 256))),
        tokens=(1, 16, 256), numerics="w4a4", runners=("native", "b12x"), with_reference=True, repeat=11, seed=3,
        output="o.json", force=True, dry_run=True, plot="p.png",
    )  # fmt: skip


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    flags = {"--" + name.replace("_", "-") for name in TuneOptions.__dataclass_fields__ if name != "layers"}
    assert len(flags) == 11
    for flag in (*flags, "--model", "--tp-size", "--ep-size"):
        assert flag in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "glm6"), ("--model", "no/such/folder"), ("--model", "8,2,256"), ("--model", "2,8,256,128"),
        ("--tokens", "0"), ("--tokens", "1,,2"), ("--tp-size", "0"), ("--ep-size", "two"), ("--numerics", "w8a8"),
        ("--repeat", "6"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_and_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--model is missing"),
        (("--model", "glm5-tp8", "--tp-size", "2"), "without a checkpoint's folder"),
        (("--model", "glm5-tp8", "--from-profile", "x"), "--from-profile with --model"),
        (("--dry-run", "--from-profile", "x"), "--from-profile with --dry-run"),
        (("--model", "8,2,256,120"), "size 120 on a rank"),
        (("--model", "glm5-tp8", "--runners", "native,fast"), "--runners fast"),
    ],
)
def test_one_clear_error(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 3


@pytest.mark.parametrize("config", [QWEN3_MOE, DEEPSEEK_V3, GLM4_MOE, MIXTRAL])
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_of_each_family(config: dict[str, object], nested: bool, tmp_path: Path) -> None:
    whole = {"text_config": config, "hidden_size": 7} if nested else config
    experts = next(config[key] for key in config if key.endswith("_experts") or key == "num_experts")
    size = config.get("moe_intermediate_size", 14336)
    want = RoutedExperts(experts, config["num_experts_per_tok"], config["hidden_size"], size, "silu")
    assert routed_experts(folder(tmp_path, whole)) == want


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "has no num_experts or n_routed_experts or num_local_experts"),
        ({"moe_intermediate_size": None}, "has no moe_intermediate_size"),  # and not the dense layer's
        ({"hidden_size": "4096"}, "has hidden_size = '4096'"),
        ({"num_experts_per_tok": True}, "has num_experts_per_tok = True"),
        ({"num_experts": 0}, "has num_experts = 0"),
    ],
)
def test_a_config_without_routed_experts_is_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        routed_experts(folder(tmp_path, QWEN3_MOE | change))
    assert said in error.value.found


def test_a_folder_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        routed_experts(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        routed_experts(tmp_path)


@pytest.mark.parametrize(
    ("config", "tp", "ep", "want"),
    [
        (QWEN3_MOE, 1, 1, (128, 8, 4096, 1536, None)),
        (QWEN3_MOE, 4, 1, (128, 8, 4096, 384, None)),
        (QWEN3_MOE, 4, 2, (64, 8, 4096, 768, 128)),
        (QWEN3_MOE, 4, 4, (32, 8, 4096, 1536, 128)),
        (DEEPSEEK_V3, 8, 1, (256, 8, 7168, 256, None)),
        (MIXTRAL, 8, 8, (1, 2, 4096, 14336, 8)),  # fewer experts on a rank than a token has
    ],
)
def test_one_ranks_part(
    config: dict[str, object], tp: int, ep: int, want: tuple[int, int, int, int, int | None], tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", config)
    (layer,) = parse("--model", str(path), "--tp-size", str(tp), "--ep-size", str(ep)).layers
    shape = layer.shape
    sizes = (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size, layer.num_global_experts)
    assert sizes == want
    assert shape.name.startswith("model")


@pytest.mark.parametrize(
    ("tp", "ep", "activation", "said"),
    [
        (4, 3, "silu", "--ep-size 3"),
        (5, 5, "silu", "128 experts in 5 parts"),
        (5, 1, "silu", "1536 of the experts' intermediate size in 5 parts"),
        (256, 1, "silu", "size 6 on a rank"),
        (1, 1, "gelu", "activation gelu"),
    ],
)
def test_a_part_that_is_none_is_refused(tp: int, ep: int, activation: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        rank_layer(RoutedExperts(128, 8, 4096, 1536, activation), "model", tp, ep)
    assert said in error.value.found


def test_the_options_load_without_anything_installed() -> None:
    """Bare interpreter: `--help` and `doctor` need them."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.tune.options; "
    code += "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'rich', 'msgspec'})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n", done.stderr
