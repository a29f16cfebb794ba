"""The launcher looks at its machine once, before what may stop the start, and is not stopped by what it sees."""

from __future__ import annotations

import pytest

from sglang_sm120 import plugin
from sglang_sm120.doctor import quick
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import apply, resolution
from sglang_sm120.options import Sm120Options


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order; the machine is one that will be refused."""
    pytest.importorskip("sglang")
    seen: list[str] = []

    def refuse(options: Sm120Options) -> None:
        seen.append("refused")
        raise UnsupportedError("no such GPU", "another", "buy it")

    monkeypatch.setattr(apply, "require_tree", lambda: None)
    monkeypatch.setattr(resolution, "require_machine", refuse)
    monkeypatch.setattr(quick, "log_problems", lambda: seen.append("looked"))
    monkeypatch.setattr(resolution, "_look", plugin._look_at_machine)
    return seen


def test_it_is_looked_at_once_and_before_it_is_refused(looks: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            resolution._prepare(object(), Sm120Options(enable_sm120_opts=True))
    assert looks == ["looked", "refused", "refused"]


def test_registering_keeps_what_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("sglang.srt.arg_groups.resolution_hooks")
    names: list[str] = []
    monkeypatch.setattr(hooks, "register_resolution_hook", lambda name: names.append(name) or (lambda hook: hook))
    monkeypatch.setattr(resolution, "_registered", False)
    monkeypatch.setattr(resolution, "_look", None)
    resolution.register(plugin._look_at_machine)
    resolution.register(None)
    assert names == ["handle_moe_kernel_config"] and resolution._look is plugin._look_at_machine
