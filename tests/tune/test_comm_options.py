"""The command line of `sglang-sm120 tune --comm`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.cli import _COMM_BASELINES, main
from sglang_sm120.tune import comm
from sglang_sm120.tune.comm_options import MESSAGE_BYTES, CommOptions, default_rows

ROOT = Path(__file__).resolve().parent.parent.parent
SGLANG = _COMM_BASELINES["sglang"]


def parse(*arguments: str) -> CommOptions:
    """What the command line comes to, without running it."""
    seen: list[CommOptions] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "run", lambda options: seen.append(options) or 0)
        assert main(["tune", "--comm", *arguments]) == 0
    return seen[0]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of the baseline's packages, those that are to be found; to be changed."""
    found, names = importlib.util.find_spec, {"sglang", "sgl_kernel"}

    def find_spec(name: str, *rest: object) -> object:
        return (object() if name in names else None) if name in ("sglang", "sgl_kernel") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


def test_defaults(installed: set[str]) -> None:
    assert parse("--hidden-size", "6144") == CommOptions(hidden_size=6144, baseline=SGLANG, no_baseline="")


def test_all_options(installed: set[str]) -> None:
    options = parse(
        "--hidden-size", "4096", "--world-size", "4", "--devices", "3,2,1,0", "--rows", "64,1,8", "--dtype", "float16",
        "--repeat", "11", "--baseline", "none", "--output", "o.json", "--force", "--plot", "p.png", "--markdown",
        "m.md", "--time-limit", "30",
    )  # fmt: skip
    assert options == CommOptions(
        hidden_size=4096, world_size=4, devices=(3, 2, 1, 0), rows=(1, 8, 64), dtype="float16", repeat=11,
        output="o.json", force=True, plot="p.png", markdown="m.md", time_limit_s=30.0,
    )  # fmt: skip
    assert options.baseline is None
    assert options.no_baseline == "--baseline none"
    assert parse("--from-profile", "f", "--plot", "p", "--markdown", "m") == CommOptions(
        from_profile="f", plot="p", markdown="m"
    )


def test_the_baseline_is_taken_where_it_is_installed(installed: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--hidden-size", "64", "--baseline", "sglang").baseline == SGLANG
    assert parse("--hidden-size", "64", "--baseline", "some.module:function").baseline == "some.module:function"
    installed.discard("sgl_kernel")
    options = parse("--hidden-size", "64")
    assert (options.baseline, options.no_baseline) == (None, "sgl_kernel not installed")
    assert main(["tune", "--comm", "--hidden-size", "64", "--baseline", "sglang"]) == 1
    assert "--baseline sglang: sgl_kernel not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "size"),
    [({"hidden_size": 5120}, 5120), ({"hidden_size": 7, "text_config": {"hidden_size": 4096}}, 4096)],
)
def test_a_models_hidden_size(config: dict[str, object], size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse("--model", str(tmp_path)).hidden_size == size


def test_a_named_layers_hidden_size() -> None:
    assert parse("--model", "glm5-tp8").hidden_size == 6144


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"hidden_size": "4096"}', '{"text_config": null}'])
def test_a_config_without_a_hidden_size(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main(["tune", "--comm", "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "has no hidden_size" in error
    assert "--hidden-size N" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--comm",), "--comm with 0 models"),
        (("--comm", "--hidden-size", "64", "--model", "glm5-tp8"), "both --hidden-size and --model"),
        (("--comm", "--model", "glm5-tp8", "glm5-tp8"), "--comm with 2 models"),
        (("--comm", "--hidden-size", "64", "--tokens", "1,2"), "--tokens with --comm"),
        (("--comm", "--hidden-size", "64", "--runners", "native"), "--runners with --comm"),
        (("--comm", "--hidden-size", "64", "--numerics", "w4a4"), "--numerics with --comm"),
        (("--comm", "--hidden-size", "64", "--with-reference"), "--with-reference with --comm"),
        (("--comm", "--hidden-size", "64", "--dry-run"), "--dry-run with --comm"),
        (("--comm", "--hidden-size", "64", "--seed", "3"), "--seed with --comm"),
        (("--comm", "--hidden-size", "64", "--tp-size", "4"), "--tp-size with --comm"),
        (("--comm", "--hidden-size", "64", "--ep-size", "4"), "--ep-size with --comm"),
        (("--comm", "--hidden-size", "64", "--world-size", "2", "--devices", "0,1,2,3"), "--world-size 2 on --devices"),
        (("--comm", "--hidden-size", "64", "--baseline", "fast"), "--baseline fast"),
        (("--comm", "--from-profile", "x", "--hidden-size", "64"), "--hidden-size with --from-profile"),
        (("--comm", "--from-profile", "x", "--model", "glm5-tp8"), "--model with --from-profile"),
        (("--comm", "--from-profile", "x", "--force"), "--force with --from-profile"),
        (("--comm", "--from-profile", "absent.json"), "absent.json: No such file"),
        (("--model", "glm5-tp8", "--world-size", "2"), "--world-size without --comm"),
        (("--model", "glm5-tp8", "--hidden-size", "64"), "--hidden-size without --comm"),
        (("--model", "glm5-tp8", "--time-limit", "5"), "--time-limit without --comm"),
        (("--from-profile", "x", "--markdown", "m"), "--markdown without --comm"),
    ],
)
def test_one_clear_error(
    arguments: tuple[str, ...], said: str, installed: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hidden-size", "0"), ("--world-size", "two"), ("--devices", "0"), ("--devices", "0,0"), ("--rows", "1,,2"),
        ("--rows", "0"), ("--dtype", "float32"), ("--repeat", "6"), ("--time-limit", "0"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_and_named(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--comm", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help"])
    text = capsys.readouterr().out
    assert "all-reduce between GPUs (--comm):" in text
    no_flag = {"no_baseline", "time_limit_s"}
    flags = {"--" + name.replace("_", "-") for name in CommOptions.__dataclass_fields__ if name not in no_flag}
    for flag in (*flags, "--comm", "--time-limit", "--model"):
        assert flag in text
    assert "none|sglang|MODULE:FUNCTION" in text


@pytest.mark.parametrize("hidden_size", [64, 2048, 5120, 6144, 7168, 16384])
def test_the_default_sizes(hidden_size: int) -> None:
    assert MESSAGE_BYTES[0] == 4 << 10
    assert MESSAGE_BYTES[-1] == 32 << 20
    rows = default_rows(hidden_size)
    assert rows[0] >= 1
    assert list(rows) == sorted(set(rows))
    for size in MESSAGE_BYTES:
        nearest = min(abs(2 * hidden_size * count - size) for count in rows)
        assert nearest <= hidden_size or (size < 2 * hidden_size and rows[0] == 1)


def test_default_rows_worked_by_hand() -> None:
    assert default_rows(6144) == (1, 3, 5, 11, 21, 43, 85, 171, 341, 683, 1365, 2731)


def test_the_options_load_without_anything_installed() -> None:
    """Bare interpreter: `--help` and `doctor` need them."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.tune.comm_options; "
    code += "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'rich', 'msgspec'})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n", done.stderr
