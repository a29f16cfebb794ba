"""The staged upstream patches: well formed, linked to the hook table, and enough to make our hooks unnecessary."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_sm120.integration.check import check_tree, version_problem
from sglang_sm120.integration.hooks import HOOKS, Hook
from tests.patched_sglang import PATCHES, files, git_apply, header, patched_copy, pristine_copy, series

every_patch = pytest.mark.parametrize("patch", series(), ids=lambda patch: patch[:4])
FIELDS = {"Base", "Replaces-Hook", "Forwarded", "Applied-Upstream", "Tested"}
BY_NAME = {hook.name: hook for hook in HOOKS}


def replaced(patch: str) -> set[str]:
    """The hooks that a patch says it makes unnecessary; "none (why)" names none."""
    field = header(patch)["Replaces-Hook"]
    return set() if field.startswith("none (") else {name.strip() for name in field.split(",")}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pristine_copy(tmp_path_factory.mktemp("pristine"))


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_copy(tmp_path_factory.mktemp("patched"))


def run_python(tree: Path | None, *args: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the SGLang in `tree` (None: the installed one) and no plugins loaded by SGLang."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    env |= {"SGLANG_PLUGINS": "none", "PYTHONPATH": str(tree) if tree else ""}
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *args], capture_output=True, text=True, timeout=240, env=env
    )


def run_tested(tree: Path | None, file: Path) -> subprocess.CompletedProcess[str]:
    return run_python(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", str(file))


def test_the_series_lists_every_patch_in_number_order() -> None:
    assert series() == sorted(path.name for path in PATCHES.glob("*.patch"))
    assert [int(patch[:4]) for patch in series()] == list(range(1, len(series()) + 1))
    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", patch) for patch in series())


@every_patch
def test_header_fields(patch: str) -> None:
    fields = header(patch)
    assert set(fields) == FIELDS
    project, version = fields["Base"].split()
    assert project == "sglang"
    assert version_problem(version) is None
    for name in ("Forwarded", "Applied-Upstream"):
        assert re.fullmatch(r"no|https://github\.com/sgl-project/sglang/pull/\d+", fields[name])
    _, _, below_test = fields["Tested"].partition("test/")
    assert files(patch)[below_test], "the patch adds its own test"
    assert all(path.startswith(("sglang/", "registered/")) for path in files(patch))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_each_hook_names_its_patch_or_says_why_there_is_none(hook: Hook) -> None:
    if hook.patch is None:
        assert hook.no_patch
        assert hook.door is None
        assert not any(hook.name in replaced(patch) for patch in series())
    else:
        assert not hook.no_patch
        assert hook.name in replaced(hook.patch)
        module, _, function = hook.door.partition(":")
        assert module.replace(".", "/") + ".py" in files(hook.patch), "the patch touches the door's module"
        assert f"\n+def {function}(" in (PATCHES / hook.patch).read_text()


@every_patch
def test_each_hook_that_a_patch_replaces_points_back(patch: str) -> None:
    assert {name: BY_NAME[name].patch for name in replaced(patch)} == dict.fromkeys(replaced(patch), patch)


@every_patch
def test_applies_alone(patch: str, pristine: Path) -> None:
    done = git_apply(pristine, patch, "--check", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Checking patch ") == len(files(patch))


@every_patch
def test_its_test_passes_with_the_patch_and_fails_without(patch: str, patched: Path) -> None:
    test = patched / header(patch)["Tested"].removeprefix("test/")
    with_patch = run_tested(patched, test)
    assert with_patch.returncode == 0, with_patch.stdout[-3000:]
    assert re.search(r"^[1-9]\d* passed", with_patch.stdout, re.MULTILINE)
    without = run_tested(None, test)
    assert without.returncode in (1, 2), without.stdout[-3000:]
    added = [path.removesuffix(".py").rpartition("/")[2] for path, is_new in files(patch).items() if is_new]
    missing = re.search(r"cannot import name '(\w+)'", without.stdout)
    assert (missing and missing[1] in added) or "AssertionError" in without.stdout, without.stdout[-3000:]


def test_the_tree_fits_through_its_doors_alone(patched: Path, tmp_path: Path) -> None:
    assert check_tree(patched / "sglang", "0.5.23") == []
    doorless = patched_copy(tmp_path / "doorless")
    for door in {hook.door for hook in HOOKS if hook.door}:
        (doorless / (door.partition(":")[0].replace(".", "/") + ".py")).unlink()
    problems = check_tree(doorless / "sglang", "0.5.23")
    assert {problem.hook for problem in problems} == set().union(*map(replaced, series()))
    assert len(problems) >= 6
    assert all("not one that was tested" in problem.found for problem in problems)


def test_a_damaged_emulation_target_is_still_noticed(patched: Path, tmp_path: Path) -> None:
    """Doors take the place of their own hooks only."""
    tree = patched_copy(tmp_path / "changed") / "sglang"
    file = tree / "srt/layers/quantization/modelopt_quant.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("def get_supported_act_dtypes(", "def get_supported_act_dtypes_2("))
    assert [problem.hook for problem in check_tree(tree, "0.5.23")] == ["emulate_modelopt_float32"]


def test_our_functions_go_through_the_doors(patched: Path) -> None:
    code = """
        import sglang
        from sglang_sm120.integration import all_reduce_fusion, apply, lifecycle, metrics, moe, server_options
        from sglang_sm120.integration.hooks import HOOKS, Stage
        for _ in range(2):
            for stage in Stage:
                apply.install(stage)
        apply.verify(set(Stage))
        from sglang.srt.plugins.hook_registry import HookRegistry
        print("hooked", *sorted(row.name for row in HOOKS if HookRegistry._hooks.get(row.target)))

        from sglang.srt.layers.layer_boundary.fusions.registered import _PROVIDERS
        from sglang.srt.layers.moe.moe_runner.layer_override import _OVERRIDES
        from sglang.srt.model_executor.forward_observer import _OBSERVERS
        from sglang.srt.plugins.lifecycle import _MODEL_READY, _PROCESS_READY
        from sglang.srt.plugins.server_options import _REGISTERED
        assert _PROVIDERS == [all_reduce_fusion.FUSIONS]
        assert _OVERRIDES == [moe.serve_layer]
        assert _OBSERVERS == [metrics.observe_forward]
        assert (_PROCESS_READY, _MODEL_READY) == ([lifecycle.on_process_ready], [lifecycle.on_model_ready])
        (options,) = _REGISTERED
        assert options == (server_options.add_cli_args, server_options.attach_or_exit, server_options.describe,
                           server_options.KEYWORDS)
        print("from", sglang.__path__[0])
    """
    done = run_python(patched, "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    hooked, tree = done.stdout.splitlines()[-2:]
    assert tree == f"from {patched / 'sglang'}"
    assert hooked.split()[1:] == sorted(hook.name for hook in HOOKS if not hook.patch)
