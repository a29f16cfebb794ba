"""--sm120-all-reduce before weights are read: which servers our kernels are for, and what stops who asks for them."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration import all_reduce_rules as rules
from sglang_sm120.options import Sm120Options
from sglang_sm120.testing import cpu_platform

pytest.importorskip("sglang")

SETTINGS: dict[str, Any] = {
    "tp_size": 4,
    "nnodes": 1,
    "attn_dp_size": 1,
    "enable_dp_attention": False,
    "elastic_ep_backend": None,
    **{
        f"enable_{name}": False
        for name in (
            "two_batch_overlap", "single_batch_overlap", "pdmux", "deterministic_inference", "mscclpp", "symm_mem"
        )
    },
}  # fmt: skip
UNCOVERED = {
    "tp_size": (6, "--tp 6"),
    "nnodes": (2, "--nnodes 2"),
    "attn_dp_size": (2, "attention data parallelism"),
    "enable_dp_attention": (True, "attention data parallelism"),
    "enable_two_batch_overlap": (True, "--enable-two-batch-overlap"),
    "enable_single_batch_overlap": (True, "--enable-single-batch-overlap"),
    "enable_pdmux": (True, "--enable-pdmux"),
    "enable_deterministic_inference": (True, "--enable-deterministic-inference"),
    "enable_mscclpp": (True, "--enable-mscclpp"),
    "enable_symm_mem": (True, "--enable-symm-mem"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend mooncake"),
}


def options(choice: str, profile: str = "") -> Sm120Options:
    return Sm120Options(enable_sm120_opts=True, sm120_all_reduce=choice, sm120_all_reduce_profile=profile)


def view(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**SETTINGS | changed)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_platform, "is_active", lambda: False)


def test_every_setting_that_is_looked_at_is_one_of_sglangs() -> None:
    """A renamed one would stop a server that stock SGLang starts."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert set(SETTINGS) <= fields
    assert {flag[2:].replace("-", "_") for flag in rules._FLAGS} <= set(SETTINGS)


def test_sglang_reads_the_variable_that_turns_stock_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed.device_communicators.pcie_ipc_ar import eligible_group

    monkeypatch.delenv(rules._STOCK_VARIABLE, raising=False)
    for choice, on in (("auto", False), ("off", False), ("one-shot", False), ("stock", True)):
        rules.turn_stock_on(options(choice))
        assert eligible_group(group_name="tp", world_size=2, deterministic=False) is on
    monkeypatch.delenv(rules._STOCK_VARIABLE)


@pytest.mark.parametrize(
    ("choice", "tp_size", "wanted"),
    [
        ("auto", 1, False), ("auto", 2, True), ("one-shot", 2, True), ("two-shot", 8, True), ("off", 8, False),
        ("stock", 8, False),
    ],
)  # fmt: skip
def test_when_our_hooks_are_installed(choice: str, tp_size: int, wanted: bool) -> None:
    assert rules.wanted(options(choice), view(tp_size=tp_size)) is wanted


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_an_ordinary_server_is_covered(tp_size: int, with_gpu) -> None:
    assert rules.uncovered(options("auto"), view(tp_size=tp_size), {}) is None
    assert rules.uncovered(options("auto"), view(elastic_ep_backend="none"), {"NCCL_P2P_DISABLE": "0"}) is None
    for choice in ("auto", "off", "one-shot", "two-shot"):
        rules.require(options(choice), view(tp_size=tp_size), {})


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_is_not_covered_stops_a_choice_by_name_only(name: str, with_gpu) -> None:
    value, says = UNCOVERED[name]
    server = view(**{name: value})
    assert rules.uncovered(options("auto"), server, {}).found == says
    for choice in ("auto", "off"):
        rules.require(options(choice), server, {})
    for choice in rules.NAMED:
        with pytest.raises(UnsupportedError) as caught:
            rules.require(options(choice), server, {})
        assert caught.value.found == f"--sm120-all-reduce {choice}: {says}"
        assert "drop --sm120-all-reduce" in caught.value.fix


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments(name: str, with_gpu) -> None:
    environ = {name: "max_split_size_mb:64, expandable_segments: True"}
    assert "expandable_segments" in rules.uncovered(options("auto"), view(), environ).found
    with pytest.raises(UnsupportedError) as caught:
        rules.require(options("two-shot"), view(), environ)
    assert f"take expandable_segments out of {name}, or drop --sm120-all-reduce" in caught.value.fix
    rules.require(options("auto"), view(), environ)
    assert rules.uncovered(options("auto"), view(), {name: "expandable_segments:False"}) is None


def test_a_machine_whose_owner_switched_p2p_off_is_left_alone_unless_asked(with_gpu) -> None:
    environ = {"NCCL_P2P_DISABLE": "1"}
    assert rules.uncovered(options("auto"), view(), environ).found == "NCCL_P2P_DISABLE=1"
    rules.require(options("one-shot"), view(), environ)


def test_one_rank(with_gpu) -> None:
    for choice in ("auto", "off", "stock"):
        rules.require(options(choice), view(tp_size=1), {})
    with pytest.raises(UnsupportedError, match="nothing to sum"):
        rules.require(options("one-shot"), view(tp_size=1), {})


@pytest.mark.parametrize("choice", ["one-shot", "two-shot", "stock"])
def test_without_a_gpu_a_choice_by_name_stops(choice: str, monkeypatch) -> None:
    monkeypatch.setattr(cpu_platform, "is_active", lambda: True)
    with pytest.raises(UnsupportedError, match="no CUDA GPU"):
        rules.require(options(choice), view(), {})
    rules.require(options("auto"), view(), {})


def test_stock_needs_flashinfers_pcie_ipc(with_gpu, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedError) as caught:
        rules.require(options("stock"), view(), {})
    assert "FlashInfer's pcie_ipc cannot be imported" in caught.value.found
    assert "pip install flashinfer-python" in caught.value.fix
    comm = ModuleType("flashinfer.comm")
    comm.PcieIpcAllReduceWorkspace = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    rules.require(options("stock"), view(), {})
    for changed, says in (
        ({"tp_size": 3}, "--tp 3"),
        ({"enable_deterministic_inference": True}, "leaves pcie_ipc off"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            rules.require(options("stock"), view(**changed), {})


def test_stock_that_sglang_could_not_set_up_stops() -> None:
    on = SimpleNamespace(world_size=2, pcie_ipc_comm=SimpleNamespace(disabled=False))
    rules.require_stock_is_on(options("stock"), on)
    rules.require_stock_is_on(options("stock"), SimpleNamespace(world_size=1, pcie_ipc_comm=None))
    for communicator in (None, SimpleNamespace(disabled=True)):
        with pytest.raises(UnsupportedError, match="could not set up"):
            rules.require_stock_is_on(options("stock"), SimpleNamespace(world_size=2, pcie_ipc_comm=communicator))


def test_the_environment_of_the_process_is_what_counts(with_gpu, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "NCCL_P2P_DISABLE", "1")
    assert rules.uncovered(options("auto"), view()) is not None


@pytest.mark.parametrize("name", [*UNCOVERED, "one rank"])
def test_a_profile_that_was_named_asks_for_our_kernels(name: str, with_gpu) -> None:
    """What `auto` would leave to SGLang stops the server, before the file is read."""
    changed, says = ({"tp_size": 1}, "one tensor-parallel rank has nothing to sum") if name == "one rank" else (
        {name: UNCOVERED[name][0]}, UNCOVERED[name][1]
    )  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        rules.require(options("auto", "absent.json"), view(**changed), {})
    assert caught.value.found == f"--sm120-all-reduce-profile absent.json: {says}"
    assert "drop --sm120-all-reduce-profile," in caught.value.fix


def test_the_file_is_read_before_weights_are(with_gpu, tmp_path) -> None:
    path = tmp_path / "profile.json"
    for text, says in ((None, "No such file"), ("{", "truncated"), ('{"format": "x"}', "is of format 'x'")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            rules.require(options("auto", str(path)), view(), {})


def test_a_profile_of_another_number_of_ranks_stops_at_once(with_gpu, tmp_path) -> None:
    from sglang_sm120.runners.profile import Machine
    from sglang_sm120.tune import comm_profile

    machine = Machine(
        gpu="Any", capability="12.0", multiprocessors=1, driver="", torch="2", triton=None, flashinfer=None,
        sglang_sm120="0",
    )  # fmt: skip
    profile = comm_profile.CommProfile(
        format=comm_profile.FORMAT, created="now", command="", machine=machine, gpus=["a", "b"], link="PCIe",
        world_size=2, hidden_size=512, dtype="bfloat16", baseline="none", missing=[],
        points=[comm_profile.CommPoint(rows=1, bytes=1024, fused=True, candidates=[])],
    )  # fmt: skip
    path = tmp_path / "profile.json"
    comm_profile.write(profile, path)
    rules.require(options("auto", str(path)), view(tp_size=2), {})
    with pytest.raises(ConfigError, match="it is of world size 2, not 4"):
        rules.require(options("auto", str(path)), view(tp_size=4), {})


def test_without_a_gpu_no_profile_fits(monkeypatch) -> None:
    monkeypatch.setattr(cpu_platform, "is_active", lambda: True)
    with pytest.raises(UnsupportedError, match="this machine has no CUDA GPU"):
        rules.require(options("auto", "p.json"), view(), {})
