"""--sm120-l2 before weights are read: off unless asked for, so what stands in its way stops the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import l2_rules as rules
from sglang_sm120.options import Sm120Options
from sglang_sm120.testing import cpu_platform

pytest.importorskip("sglang")

SETTINGS: dict[str, Any] = {
    "enable_eplb": False,
    "elastic_ep_backend": None,
    "cpu_offload_gb": 0,
    "offload_group_size": -1,
    "enable_two_batch_overlap": False,
    "enable_single_batch_overlap": False,
    "enable_pdmux": False,
    "enable_torch_compile": False,
    "enable_lora": None,
    "lora_paths": None,
    "startup_weight_load_mode": "serial",
}
UNCOVERED = {
    "enable_eplb": (True, "--enable-eplb"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend mooncake"),
    "cpu_offload_gb": (4, "--cpu-offload-gb 4"),
    "offload_group_size": (2, "--offload-group-size 2"),
    "enable_two_batch_overlap": (True, "--enable-two-batch-overlap"),
    "enable_single_batch_overlap": (True, "--enable-single-batch-overlap"),
    "enable_pdmux": (True, "--enable-pdmux"),
    "enable_torch_compile": (True, "--enable-torch-compile"),
    "enable_lora": (True, "--enable-lora"),
    "lora_paths": (["a=/adapters/a"], "--lora-paths ['a=/adapters/a']"),
    "startup_weight_load_mode": ("overlap", "--startup-weight-load-mode overlap"),
}


def options(mode: str) -> Sm120Options:
    return Sm120Options(enable_sm120_opts=True, sm120_l2=mode)


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "is_active", lambda: False)


def test_every_setting_that_is_looked_at_is_one_of_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    assert set(SETTINGS) == set(UNCOVERED)
    assert set(SETTINGS) <= set(ServerArgs.__struct_fields__)
    defaults = ServerArgs(model_path="unused")
    for name, value in SETTINGS.items():
        assert getattr(defaults, name) == value, name


@pytest.mark.parametrize("mode", ["persist", "prefetch", "both"])
def test_plain_settings_are_served(mode: str) -> None:
    rules.require(options(mode), SimpleNamespace(**SETTINGS), {})


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_it_is_not_for_stops_the_server(name: str) -> None:
    value, found = UNCOVERED[name]
    view = SimpleNamespace(**SETTINGS | {name: value})
    with pytest.raises(UnsupportedError) as raised:
        rules.require(options("both"), view, {})
    assert raised.value.found == f"--sm120-l2 both: {found}"
    assert raised.value.fix.endswith("or drop --sm120-l2")
    rules.require(options("off"), view, {})


def test_merged_graphs_lose_windows_but_not_prefetches() -> None:
    environ = {"SGLANG_ENABLE_CUDA_GRAPH_DEDUP": "1"}
    rules.require(options("prefetch"), SimpleNamespace(**SETTINGS), environ)
    for mode in ("persist", "both"):
        with pytest.raises(UnsupportedError, match="SGLANG_ENABLE_CUDA_GRAPH_DEDUP=1"):
            rules.require(options(mode), SimpleNamespace(**SETTINGS), environ)


def test_a_cpu_has_no_l2_to_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "is_active", lambda: True)
    rules.require(options("prefetch"), SimpleNamespace(**SETTINGS), {})
    with pytest.raises(UnsupportedError, match="no CUDA GPU"):
        rules.require(options("both"), SimpleNamespace(**SETTINGS), {})


def with_decode(monkeypatch: pytest.MonkeyPatch, backend: str, bs: list[int] | None) -> None:
    from sglang.srt import runtime_context

    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=backend, bs=bs)))
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graphs))


@pytest.mark.parametrize("backend", ["disabled", "breakable", "full"])
def test_decode_has_to_be_captured_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_decode(monkeypatch, backend, None)
    rules.require_decode_graphs(options("off"))
    if backend == "full":
        rules.require_decode_graphs(options("prefetch"))
    else:
        with pytest.raises(UnsupportedError, match=backend):
            rules.require_decode_graphs(options("prefetch"))


def test_a_graph_has_to_be_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with_decode(monkeypatch, "full", [64, 128])
    rules.require_decode_graphs(options("prefetch"))
    with_decode(monkeypatch, "full", [65, 128])
    with pytest.raises(UnsupportedError, match="smallest decode graph is of 65 requests"):
        rules.require_decode_graphs(options("prefetch"))
    rules.require_decode_graphs(options("off"))


def test_the_configuration_has_what_is_looked_at() -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, PhaseConfig

    assert {"backend", "bs"} <= PhaseConfig.__dataclass_fields__.keys() and Backend.FULL == "full"
