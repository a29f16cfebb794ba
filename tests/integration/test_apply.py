"""Hooks in a real process: installed once, verified live, noticed when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("sglang")


def run_python(code: str, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter: hooks change a process for good."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *argv],
        capture_output=True, text=True, timeout=240, env={**environ, **(env or {})},
    )  # fmt: skip


def test_every_stage_is_live_after_install_and_installing_twice_adds_nothing() -> None:
    done = run_python(
        """
        from sglang_sm120.integration import apply
        from sglang_sm120.integration.hooks import HOOKS, Stage
        from sglang.srt.plugins.hook_registry import HookRegistry
        for _ in range(2):
            for stage in Stage:
                apply.install(stage)
        apply.verify(set(Stage))
        counts = {row.name: len(HookRegistry._hooks[row.target]) for row in HOOKS}
        assert set(counts.values()) == {1}, counts
        print("live", len(counts))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("live ")


@pytest.mark.parametrize("stage", ["PROCESS", "SCHEDULER", "ALL_REDUCE", "EMULATION", "CPU"])
def test_a_hook_that_is_not_there_is_named(stage: str) -> None:
    done = run_python(
        f"""
        from sglang_sm120.errors import HookError
        from sglang_sm120.integration import apply
        from sglang_sm120.integration.hooks import HOOKS, Stage
        names = [row.name for row in HOOKS if row.stage is Stage.{stage}]
        assert names
        try:
            apply.verify({{Stage.{stage}}})
        except HookError as error:
            assert all(f"- {{name}}: " in str(error) for name in names), str(error)
            print("named", *names)
        """
    )
    assert done.stdout.startswith("named "), done.stdout + done.stderr


def test_a_hook_that_comes_too_late_and_one_that_is_replaced_are_named() -> None:
    """HookRegistry never patches a target twice, and a plugin may assign over ours: both would be silently off."""
    done = run_python(
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        target = "sglang.srt.server_args.ServerArgs.resolved_dict"
        HookRegistry.register(target, lambda result, *a: result, HookType.AFTER)
        HookRegistry.apply_hooks()
        from sglang_sm120.errors import HookError
        from sglang_sm120.integration import apply
        from sglang_sm120.integration.hooks import Stage
        apply.install(Stage.PROCESS)
        import sglang.srt.server_args as server_args
        server_args.ServerArgs.from_cli_args = classmethod(lambda cls, args: None)
        try:
            apply.verify({Stage.PROCESS})
        except HookError as error:
            text = str(error)
            assert "- server_info: " in text and "- cli_values: " in text, text
            assert "- cli_flags: " not in text and "- process_ready: " not in text, text
            print("both named")
        """
    )
    assert done.stdout.strip() == "both named", done.stdout + done.stderr


def test_another_plugin_around_ours_is_no_fault() -> None:
    done = run_python(
        """
        import functools
        from sglang_sm120.integration import apply
        from sglang_sm120.integration.hooks import Stage
        apply.install(Stage.PROCESS)
        import sglang.srt.server_args as server_args
        inner = server_args.ServerArgs.resolved_dict
        @functools.wraps(inner)
        def outer(self):
            return inner(self)
        server_args.ServerArgs.resolved_dict = outer
        apply.verify({Stage.PROCESS})
        print("live")
        """
    )
    assert done.stdout.strip() == "live", done.stderr


_REGISTER_WITH_A_NEWER_SGLANG = """
import sglang.version
sglang.version.__version__ = "0.5.99"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
print("hooks", sum("sglang_sm120" in hook.__module__ for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks))
"""


def test_a_newer_sglang_stops_the_server_only_if_we_were_asked_for() -> None:
    not_asked = run_python(_REGISTER_WITH_A_NEWER_SGLANG)
    assert not_asked.returncode == 0
    assert not_asked.stdout.strip() == "hooks 0", not_asked.stdout
    asked = run_python(_REGISTER_WITH_A_NEWER_SGLANG, "--enable-sm120-opts")
    assert asked.returncode == 1
    assert "found" not in asked.stdout
    assert "SGLang 0.5.99" in asked.stderr
    assert "needed: SGLang >= 0.5.23, < 0.5.24" in asked.stderr


def test_light_processes_stay_light() -> None:
    """Loading the plugin imports nothing of ours that is heavy, and no model code of SGLang's."""
    done = run_python(
        """
        import sys
        from sglang.srt.plugins import load_plugins
        import sglang.srt.server_args
        before = set(sys.modules)
        load_plugins()
        new = set(sys.modules) - before
        ours = {name for name in new if name.startswith("sglang_sm120")}
        assert "sglang_sm120.plugin" in ours, ours
        heavy = [n for n in new if n.startswith(("sglang_sm120.kernels", "sglang_sm120.integration.moe", "triton",
                 "sglang.srt.layers.moe", "sglang.srt.managers.scheduler", "sglang.srt.model_executor"))]
        assert not heavy, heavy
        print("light", len(new))
        """
    )
    assert done.stdout.startswith("light "), done.stdout + done.stderr
