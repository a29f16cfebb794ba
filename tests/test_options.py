"""The option table: precedence, checks, pickling, and what an argv says before anything is parsed."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest

from sglang_sm120 import options as table
from sglang_sm120.errors import ConfigError
from sglang_sm120.options import OPTIONS, Sm120Options, add_cli_args, asked_for, flag_given, resolve


def _parse(*argv: str, environ: dict[str, str] | None = None) -> Sm120Options:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return resolve(vars(parser.parse_args(argv)), environ or {})


def test_defaults_are_off_and_match_the_table() -> None:
    assert _parse() == Sm120Options()
    assert {option.name: option.default for option in OPTIONS} == Sm120Options().as_dict()


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_MOE_NUMERICS": "w4a4"}
    assert _parse(environ=environ).sm120_moe_numerics == "w4a4"
    assert _parse("--sm120-moe-numerics", "w4a16", environ=environ).sm120_moe_numerics == "w4a16"
    assert not resolve({"enable_sm120_opts": False}, {"SGLANG_SM120_ENABLE": "1"}).enable_sm120_opts


def test_when_the_stock_path_cannot_serve() -> None:
    assert not _parse("--enable-sm120-opts").needs_own_runner
    assert not _parse("--enable-sm120-opts", "--sm120-moe-backend", "flashinfer_cutlass").needs_own_runner
    assert _parse("--enable-sm120-opts", "--sm120-emulate").needs_own_runner
    for name in ("native", "b12x", "reference"):
        assert _parse("--enable-sm120-opts", "--sm120-moe-backend", name).needs_own_runner


def test_an_all_reduce_profile_goes_with_auto() -> None:
    assert _parse("--enable-sm120-opts").sm120_all_reduce_profile == ""
    given = ("--enable-sm120-opts", "--sm120-all-reduce-profile", "p.json")
    for more in ((), ("--sm120-all-reduce", "auto")):
        assert _parse(*given, *more).sm120_all_reduce_profile == "p.json"
    environ = {"SGLANG_SM120_ENABLE": "1", "SGLANG_SM120_ALL_REDUCE_PROFILE": "q.json"}
    assert _parse(environ=environ).sm120_all_reduce_profile == "q.json"


@pytest.mark.parametrize("text", ["1", "true", "Yes", "ON"])
def test_true_words(text: str) -> None:
    assert resolve({}, {"SGLANG_SM120_ENABLE": text}).enable_sm120_opts


@pytest.mark.parametrize(
    ("given", "environ", "says"),
    [
        ({"enable_sm120_opts": True, "sm120_moe_backend": "nativ"}, {}, "--sm120-moe-backend='nativ'"),
        ({"enable_sm120_opts": True}, {"SGLANG_SM120_MOE_BACKEND": "fast"}, "SGLANG_SM120_MOE_BACKEND='fast'"),
        ({"enable_sm120_opts": True}, {"SGLANG_SM120_EMULATE": "maybe"}, "SGLANG_SM120_EMULATE='maybe'"),
        ({"enable_sm120_opts": True}, {"SGLANG_SM120_MOE_BACKND": "auto"}, "did you mean SGLANG_SM120_MOE_BACKEND?"),
        ({"enable_sm120_optz": True}, {}, "did you mean enable_sm120_opts?"),
        ({"sm120_moe_numerics": "w4a16"}, {}, "--sm120-moe-numerics without --enable-sm120-opts"),
        ({}, {"SGLANG_SM120_EMULATE": "1"}, "SGLANG_SM120_EMULATE without --enable-sm120-opts"),
        (
            {"enable_sm120_opts": True, "sm120_moe_backend": "flashinfer_cutlass", "sm120_moe_numerics": "w4a16"},
            {},
            "the stock CUTLASS path always quantises",
        ),
        (
            {"enable_sm120_opts": True, "sm120_moe_backend": "flashinfer_cutlass", "sm120_emulate": True},
            {},
            "cannot be emulated",
        ),
        (
            {"enable_sm120_opts": True, "sm120_moe_backend": "native", "sm120_moe_profile": "p.json"},
            {},
            "a profile chooses among runners",
        ),
        *(
            (
                {"enable_sm120_opts": True, "sm120_all_reduce": choice, "sm120_all_reduce_profile": "p.json"},
                {},
                f"--sm120-all-reduce-profile with --sm120-all-reduce {choice}",
            )
            for choice in ("off", "one-shot", "two-shot", "stock")
        ),
        (
            {"enable_sm120_opts": True, "sm120_all_reduce": "off"},
            {"SGLANG_SM120_ALL_REDUCE_PROFILE": "p.json"},
            "a profile chooses what serves which size",
        ),
        ({"sm120_all_reduce_profile": "p.json"}, {}, "--sm120-all-reduce-profile without --enable-sm120-opts"),
        ({"enable_sm120_opts": True, "sm120_verify": "maybe"}, {}, "--sm120-verify='maybe'"),
    ],
)
def test_unknown_and_contradictory_values_stop_with_the_fix(given: dict, environ: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(given, environ)
    text = str(caught.value)
    assert says in text
    assert "needed:" in text
    assert caught.value.fix


def test_a_misspelt_variable_does_not_matter_while_off() -> None:
    assert resolve({}, {"SGLANG_SM120_MOE_BACKND": "auto"}) == Sm120Options()


def test_pickling_and_copying_keep_the_options_and_tell_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_unpickled_enabled", False)
    off = Sm120Options()
    assert pickle.loads(pickle.dumps(off)) == off
    assert not table.unpickled_enabled_options()
    on = Sm120Options(enable_sm120_opts=True, sm120_emulate=True, sm120_moe_numerics="w4a16")
    assert pickle.loads(pickle.dumps(on)) == copy.deepcopy(on) == on
    assert table.unpickled_enabled_options()


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("enable-sm120-opts: true\n", True),
        ("tp-size: 2\nenable_sm120_opts: yes  # on\n", True),
        ("enable-sm120-opts: false\n", False),
        ("tp-size: 2\n", False),
    ],
)
def test_a_config_file_counts_as_asking(text: str, given: bool, tmp_path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert asked_for(["sglang", "serve", "--config", str(file)], {}) is given


def test_asking_by_argv_and_by_variable() -> None:
    assert asked_for(["--enable-sm120-opts"], {})
    assert asked_for([], {"SGLANG_SM120_ENABLE": "1"})
    assert not asked_for(["--enable-sm120"], {})
    assert not asked_for(["--config"], {})
    assert not asked_for(["--config", "/nowhere.yaml"], {})
    assert flag_given("sm120_emulate", ["--sm120-emulate"], {})
    assert not flag_given("sm120_emulate", ["--enable-sm120-opts"], {})


def test_flags_are_ones_that_sglangs_config_files_can_set() -> None:
    """Its merger takes store and store_true actions only."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    ours = [action for action in parser._actions if "sm120" in action.dest]
    assert len(ours) == len(OPTIONS)
    assert all(isinstance(action, argparse._StoreTrueAction | argparse._StoreAction) for action in ours)
