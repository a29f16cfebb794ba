"""A real server that cannot do what was asked stops and names reason and fix, before it loads weights where it can."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_sm120.device import current_device
from sglang_sm120.doctor.checks import sglang_tree
from sglang_sm120.integration.check import find_target, target_file
from sglang_sm120.integration.hooks import HOOKS, Hook, Stage
from sglang_sm120.testing.checkpoints import damage
from sglang_sm120.testing.server import ServerDied, SglangServer
from tests.e2e.conftest import ON_GPU, SERVER_ARGS

pytestmark = pytest.mark.e2e

NO_EMULATION = [word for word in SERVER_ARGS if word != "--sm120-emulate"]
MAIN_HOOKS = [hook for hook in HOOKS if hook.stage in (Stage.PROCESS, Stage.SCHEDULER, Stage.ALL_REDUCE)]


def refused(model: Path, args: list[str], env: dict[str, str] | None = None, *, before_weights: bool = True) -> str:
    """Start a server that must not come up; returns its log."""
    with pytest.raises(ServerDied) as caught, SglangServer(model, args, env=env):
        pass
    log = caught.value.log
    if before_weights:
        assert "Load weight begin" not in log
    assert "needed: " in log, log[-3000:]
    assert "fix: " in log
    return log


@pytest.fixture
def nvfp4(checkpoints) -> Path:
    return checkpoints("qwen3_moe", "modelopt")[0]


@pytest.fixture
def sglang_copy(tmp_path: Path) -> Callable[[str, Callable[[str], str]], dict[str, str]]:
    """(file below sglang/, edit) -> environment whose SGLang is the installed one with that file edited."""
    installed = sglang_tree()
    assert installed is not None

    def make(file: str, edit: Callable[[str], str]) -> dict[str, str]:
        tree = tmp_path / "tree" / "sglang"
        shutil.copytree(installed, tree, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        copy = tree / file
        text = copy.read_text()
        edited = edit(text)
        assert edited != text
        copy.unlink()
        copy.write_text(edited)
        return {"PYTHONPATH": str(tree.parent)}

    return make


@pytest.mark.skipif(current_device().is_sm120, reason="needs a machine without an SM120 GPU")
def test_a_machine_without_sm120(nvfp4: Path) -> None:
    log = refused(nvfp4, NO_EMULATION)
    assert "this machine has " in log
    assert "add --sm120-emulate" in log


@pytest.mark.parametrize(
    ("fmt", "kind", "says"),
    [
        ("modelopt", "mxfp4_as_nvfp4", "32 elements a scale (MXFP4)"),
        ("modelopt", "missing_weight_scale", "weight_scale is missing"),
        ("modelopt", "nan_weight_scale_2", "weight_scale_2 is nan"),
        ("compressed-tensors", "zero_weight_scale_2", "weight_global_scale is "),
    ],
)
def test_a_damaged_checkpoint(fmt: str, kind: str, says: str, checkpoints, tmp_path: Path) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", fmt)
    assert says in refused(damage(nvfp4, tmp_path / kind, kind), SERVER_ARGS)


def test_damaged_activation_scales_matter_to_w4a4_only(nvfp4: Path, tmp_path: Path) -> None:
    broken = damage(nvfp4, tmp_path / "broken", "zero_input_scale")
    log = refused(broken, [*SERVER_ARGS, "--sm120-moe-numerics", "w4a4"])
    assert "input_scale is 0" in log
    assert "--sm120-moe-numerics w4a16" in log


def test_experts_that_do_not_divide(nvfp4: Path) -> None:
    log = refused(nvfp4, [*SERVER_ARGS, "--tp", "3", "--ep", "3"])
    assert "8 experts with --ep-size 3" in log
    assert "use one of 1, 2, 4, 8" in log


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--sm120-moe-backend", "nativ"], "--sm120-moe-backend='nativ'"),
        (["--moe-runner-backend", "triton", "--sm120-moe-backend", "reference"], "--moe-runner-backend triton with"),
        (["--sm120-moe-backend", "flashinfer_cutlass"], "cannot be emulated"),
    ],
)
def test_unknown_and_contradictory_values(args: list[str], says: str, nvfp4: Path) -> None:
    assert says in refused(nvfp4, [*SERVER_ARGS, *args])


def test_a_flag_without_the_switch(nvfp4: Path) -> None:
    log = refused(nvfp4, [*NO_EMULATION[1:], "--sm120-moe-numerics", "w4a16"])
    assert "--sm120-moe-numerics without --enable-sm120-opts" in log


def test_a_runner_asked_for_by_name_and_no_layer_for_it(checkpoints) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    plain = nvfp4.parent / "qwen3_moe"
    log = refused(plain, [*SERVER_ARGS, "--sm120-moe-backend", "reference"])
    assert "has no NVFP4 experts" in log


@pytest.mark.parametrize("hook", MAIN_HOOKS, ids=lambda hook: hook.name)
def test_a_hook_whose_target_changed(hook: Hook, nvfp4: Path, sglang_copy) -> None:
    installed = sglang_tree()
    assert installed is not None
    source, node = find_target(installed, hook.target)
    segment = source.splitlines(keepends=True)
    file, _ = target_file(installed, hook.target)
    assert file is not None
    indent = " " * (node.col_offset + 4)
    edited = "".join(segment[: node.end_lineno]) + f"{indent}pass\n" + "".join(segment[node.end_lineno :])
    log = refused(nvfp4, SERVER_ARGS, sglang_copy(str(file.relative_to(installed)), lambda _: edited))
    assert f"- {hook.name}: the source of {hook.target} is not one that was tested" in log


def test_a_newer_sglang(nvfp4: Path, sglang_copy) -> None:
    env = sglang_copy("version.py", lambda text: text + '\n__version__ = "0.5.99"\n')
    log = refused(nvfp4, SERVER_ARGS, env)
    assert "SGLang 0.5.99" in log
    assert "needed: SGLang >= 0.5.23, < 0.5.24" in log


def test_another_plugin_took_the_target_first(nvfp4: Path, tmp_path: Path) -> None:
    """HookRegistry drops a second registration on a patched target: ours would be silently missing."""
    (tmp_path / "aaa_first.py").write_text(
        "def register():\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "    target = 'sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core'\n"
        "    HookRegistry.register(target, lambda original, *a, **k: original(*a, **k), HookType.AROUND)\n"
    )
    info = tmp_path / "aaa_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-first\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\naaa = aaa_first:register\n")
    log = refused(nvfp4, SERVER_ARGS, {"PYTHONPATH": str(tmp_path)})
    assert "- moe_layer: " in log
    assert "another hook or plugin took the target first" in log


def test_left_out_by_sglang_plugins(nvfp4: Path) -> None:
    """SGLang does not load us then, so its parser refuses the flag; doctor (tests/doctor) says why."""
    with pytest.raises(ServerDied) as caught, SglangServer(nvfp4, SERVER_ARGS, env={"SGLANG_PLUGINS": "smg"}):
        pass
    assert "unrecognized arguments: --enable-sm120-opts" in caught.value.log


def test_without_the_flag_nothing_of_ours_speaks(checkpoints) -> None:
    """Where stock SGLang serves it does; without a GPU it stops, in its own words."""
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    plain = nvfp4.parent / "qwen3_moe"
    args = [word for word in SERVER_ARGS if "sm120" not in word]
    if ON_GPU:
        with SglangServer(plain, args) as server:
            log = server.log()
    else:
        with pytest.raises(ServerDied) as caught, SglangServer(plain, args):
            pass
        log = caught.value.log
        assert "No accelerator" in log
    assert "sglang-sm120" not in log.replace(str(plain), "")
