"""What `bench l2` measures, and what it refuses to time, with a clock and a profile that are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from l2_fakes import CPU, SMALL, SPIN, SUM, FakeDevice
from torch import Tensor

from sglang_sm120.bench import l2_device, l2_measure, l2_projections
from sglang_sm120.bench.l2_cases import CANDIDATES, Batch, Stack
from sglang_sm120.bench.l2_device import Kernel
from sglang_sm120.bench.l2_options import L2BenchOptions, StackShape
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.memory.l2_prefetch.api import prefetch
from sglang_sm120.kernels.memory.l2_window import api as l2_window


@pytest.fixture(autouse=True)
def _little_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_projections, "PAST_BYTES", 1 << 12)


def small_step(shape: StackShape = SMALL, on: FakeDevice | None = None, **options: Any) -> dict[str, Any]:
    stack, batch = Stack(shape, 3, CPU, 0), Batch(shape, 3, 4, 16, CPU, 0)
    chosen = L2BenchOptions(**{"repeat": 7, "captures": 2, **options})
    return l2_measure.measure_step(stack, batch, 5.0, {"max_bytes": 1000}, chosen, on or FakeDevice())


def test_a_time_is_of_a_layer_and_every_capture_has_its_own() -> None:
    on = FakeDevice()
    point = small_step(on=on)
    assert [row["candidate"] for row in point["rows"]] == list(CANDIDATES)
    for row in point["rows"]:
        assert "failure" not in row
        assert [len(samples) for samples in row["captures"]] == [7, 7]
        # 16 replays of 100 us a sample and a microsecond a look, over 3 layers
        assert all(100 / 3 < time_us < 120 / 3 for samples in row["captures"] for time_us in samples)
    assert [row["prefetched_bytes"] for row in point["rows"]][:2] == [0, 256 * 48 * 2]
    assert set(on.waits) == {5.0}


def test_no_time_for_what_differs_from_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Stack.step

    def step(self: Stack, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
        x, asked = right(self, *args, **kwargs)
        return (x * 1.01 if "next" in args[3] and "ffn" not in args[3] else x), asked

    monkeypatch.setattr(Stack, "step", step)
    rows = {row["candidate"]: row for row in small_step()["rows"]}
    assert rows["next"]["failure"] == "WRONG, not timed: capture 0 differs from off"
    assert not rows["next"]["captures"]
    assert all(len(rows[name]["captures"]) == 2 for name in CANDIDATES if name != "next")


def test_a_graph_that_writes_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is filled with NaN before the replay."""
    on = FakeDevice()
    right = on.timer.capture
    captures = []

    def capture(calls: Callable[[], None]) -> Callable[[], None]:
        captures.append(calls)
        return (lambda: None) if len(captures) == 4 else right(calls)

    monkeypatch.setattr(on.timer, "capture", capture)
    rows = {row["candidate"]: row for row in small_step(on=on)["rows"]}
    assert "WRONG" in rows["next"]["failure"]
    assert len(rows["prefetch"]["captures"]) == 2


@pytest.mark.parametrize("broken", ["off", "ffn"])
def test_what_breaks_is_named(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on, right = FakeDevice(), Stack.step

    def step(self: Stack, *args: Any, **kwargs: Any) -> tuple[Tensor, int]:
        if args[3] == CANDIDATES[broken].phases:
            raise RuntimeError("capture\nfailed")
        return right(self, *args, **kwargs)

    monkeypatch.setattr(Stack, "step", step)
    rows = {row["candidate"]: row for row in small_step(on=on)["rows"]}
    assert rows[broken]["failure"] == "failed: RuntimeError: capture failed"
    assert on.settled == 1
    timed = [name for name, row in rows.items() if row["captures"]]
    assert timed == ([] if broken == "off" else [name for name in CANDIDATES if name != "ffn"])


# ---- the step with L2 set aside ----
def test_l2_is_set_aside_for_those_that_want_it_and_for_no_other() -> None:
    """While they are captured, checked and timed; the device is waited for, and nothing persists, before it ends."""
    on = FakeDevice()
    inside: list[bool] = []
    elapsed_us = on.timer.elapsed_us

    def looked(replay: Callable[[], None], count: int) -> float:
        inside.append(on.log.count(("set aside", 1 << 15)) > on.log.count("restored"))
        return elapsed_us(replay, count)

    on.timer.elapsed_us = looked  # type: ignore[method-assign]
    rows = {row["candidate"]: row for row in small_step(on=on, captures=1)["rows"]}
    wanting = [name for name, candidate in CANDIDATES.items() if candidate.set_aside]
    assert wanting == ["set-aside", "persist", "window", "both"]
    assert inside[:9] == [candidate.set_aside for candidate in CANDIDATES.values()]
    assert inside.count(True) == 4 * (1 + 8)
    assert on.log.count("restored") == on.log.count("reset") == 4 * (1 + 1 + 8), "captured and checked, then looked at"
    for before, what in zip(on.log, on.log[1:], strict=False):
        assert what != "restored" or before == "reset"
    for name, row in rows.items():
        assert row.get("set_aside_bytes") == (1 << 15 if name in wanting else None)
        assert len(row["captures"]) == 1


def test_windows_are_over_what_is_kept_or_over_everything() -> None:
    stack, on = Stack(SMALL, 3, CPU, 0), FakeDevice(max_set_aside_bytes=1 << 16)
    chosen = L2BenchOptions(repeat=7, captures=1)
    point = l2_measure.measure_step(stack, Batch(SMALL, 3, 4, 16, CPU, 0), 5.0, {}, chosen, on)
    rows = {row["candidate"]: row for row in point["rows"]}
    share = (1 << 16) / (3 * 186368)  # the bytes of a layer's six projections
    got = {name: (row.get("windows"), row.get("hit_ratio")) for name, row in rows.items()}
    # 53248 + 6144 + 4096 bytes of the first layer; everything else is larger than the 2048 that are left
    assert got["persist"] == got["both"] == (3, 1.0)
    assert got["window"] == (18, share)
    assert {name for name, found in got.items() if found == (None, None)} == set(rows) - {"persist", "window", "both"}
    seen = [what for what in on.log if what[0] == "window"]
    assert {what[2] for what in seen} == {1.0, share}
    kept = {what[1] for what in seen if what[2] == 1.0}
    assert kept == stack.windows("kept", 1 << 16).keys()
    assert on.log.count("no window") == len(seen)
    fetched = {address for some in on.prefetcher.log for address, _ in some}
    assert rows["prefetch"]["prefetched_bytes"] > rows["both"]["prefetched_bytes"] > 0
    assert kept < fetched, "by the candidates without windows"


@pytest.mark.parametrize("reason", ["MIG forbids it", None])
def test_where_nothing_can_be_set_aside_the_other_candidates_are_timed(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = FakeDevice(0 if reason else 1 << 15, reason)
    if reason is None:  # found out when it is tried

        def refused(num_bytes: int) -> Any:
            raise UnsupportedError("none were set aside", "some", "leave MPS")

        monkeypatch.setattr(on, "set_aside", refused)
    rows = {row["candidate"]: row for row in small_step(on=on)["rows"]}
    for name, candidate in CANDIDATES.items():
        expected = (reason or "none were set aside") if candidate.set_aside else None
        assert rows[name].get("not_covered") == expected
        assert len(rows[name]["captures"]) == (0 if candidate.set_aside else 2)
        assert "failure" not in rows[name]


def test_a_window_that_breaks_in_a_step_costs_its_candidates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on = FakeDevice()

    def window(weight: Tensor, hit_ratio: float) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(on, "window", window)
    rows = {row["candidate"]: row for row in small_step(on=on)["rows"]}
    broken = [name for name, row in rows.items() if row.get("failure") == "failed: RuntimeError: no"]
    assert broken == ["persist", "window", "both"]
    assert all(len(row["captures"]) == (0 if name in broken else 2) for name, row in rows.items())
    assert on.log.count(("set aside", 1 << 15)) == on.log.count("restored")


# ---- the projections ----
def projection(on: FakeDevice) -> tuple[dict[str, Any], Tensor]:
    weight, hidden = torch.randn(512, 64).bfloat16(), torch.randn(1, 64).bfloat16()
    streamed = l2_projections.stream_buffer(on.l2_bytes, CPU)
    of_all = 4 * weight.nbytes
    return l2_projections.measure_projection("o_proj", weight, hidden, {"blocks": 3}, streamed, of_all, on), weight


def test_the_projection_in_every_case() -> None:
    on = FakeDevice()
    measured, weight = projection(on)
    assert measured["bytes"] == 512 * 64 * 2 == 1 << 16
    for row in measured["rows"]:
        assert row["samples_us"] == [7.5] * 20
        assert row["stream_us"] == ([] if row["case"] == "hot" else [100.0] * 20)
        assert row["kernels"] == ["cublasLt::splitKreduce_kernel", "gemvx::kernel"]
    assert on.prefetcher.log[0] == [(weight.data_ptr(), 1 << 16)]
    assert on.prefetcher.how == {"blocks": 3}, "no bound: the whole weight"
    assert set(on.waits) == {1.0, 30.0 + 65536 / 1e6}


def test_the_set_aside_is_restored_and_nothing_stays_behind() -> None:
    on = FakeDevice()
    _, weight = projection(on)
    asides = [number for number, what in enumerate(on.log) if what == ("set aside", 1 << 15)]
    assert len(asides) == 4
    for first in asides:
        rest = on.log[first : on.log.index("restored", first) + 1]
        assert rest[-2:] == ["reset", "restored"]
    ratios = {what[2] for what in on.log if what[0] == "window"}
    assert ratios == {1.0, 0.125}, "an eighth of all projections fits"
    assert {what[1] for what in on.log if what[0] == "window"} == {weight.data_ptr()}


def test_where_nothing_can_be_set_aside_the_other_cases_are_measured() -> None:
    measured, _ = projection(FakeDevice(0, "MIG forbids it"))
    got = {row["case"]: row.get("not_covered") for row in measured["rows"]}
    assert [reason for reason in got.values() if reason] == ["MIG forbids it"] * 4
    assert all(got[case] is None for case in ("cold", "prefetched", "prefetched, 40 MB past", "hot"))


def test_a_window_that_this_gpu_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    on = FakeDevice()

    def window(weight: Tensor, hit_ratio: float) -> Any:
        raise UnsupportedError("too long a window", "a shorter one", "take one")

    monkeypatch.setattr(on, "window", window)
    measured, _ = projection(on)
    assert [row["not_covered"] for row in measured["rows"] if "not_covered" in row] == ["too long a window"] * 3
    assert not any("failure" in row for row in measured["rows"])


def test_a_window_that_breaks_is_named_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    on = FakeDevice()

    def window(weight: Tensor, hit_ratio: float) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(on, "window", window)
    measured, _ = projection(on)
    failed = [row["failure"] for row in measured["rows"] if "failure" in row]
    assert failed == ["failed: RuntimeError: no"] * 3
    assert on.log.count("restored") == 4
    assert on.settled == 3


def test_a_profile_is_split_by_its_waits() -> None:
    def kernels(*named: tuple[str, float]) -> list[Kernel]:
        return [Kernel(name, float(number), us) for number, (name, us) in enumerate(named)]

    one = [(SPIN, 1.0), ("gemv", 3.0), (SPIN, 30.0), ("gemv", 2.0)]
    hot = l2_projections.split(kernels(*one, *one), 2, streams=False)
    assert hot == {"samples_us": [2.0, 2.0], "stream_us": [], "waited_us": 30.0, "kernels": ["gemv"]}, (
        "not the one that warms"
    )
    assert "failed: 3 waits" in l2_projections.split(kernels(*one, *one[:2]), 2, streams=False)["failure"]
    missing = l2_projections.split(kernels(*one[:3], (SUM, 1.0)), 1, streams=True)
    assert "no kernel of the projection" in missing["failure"]
    assert SUM in missing["failure"]


def test_the_kernels_take_what_they_are_given() -> None:
    """Where there is no GPU, at least the arguments are right."""
    assert {"max_bytes", "blocks"} <= inspect.signature(prefetch).parameters.keys()
    inspect.signature(l2_window.limits).bind(CPU)
    inspect.signature(l2_window.set_aside).bind(1)
    inspect.signature(l2_window.reset_persisting).bind()
    inspect.signature(l2_window.stream_window).bind(0, l2_window.AccessPolicyWindow(16, 16, 0.5))
    assert "persisting_max_bytes" in l2_window.L2Limits.__dataclass_fields__


class _Clock:
    """1980 cycles a microsecond, and 3 microseconds a launch; a capture runs what it is given."""

    def __init__(self) -> None:
        self.cycles = 0

    def elapsed_us(self, replay: Callable[[], None], count: int) -> float:
        replay()
        return self.cycles / 1980 * count + 3

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        calls()
        return calls


def test_a_wait_is_as_long_as_this_gpus_clock_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(clock, "cycles", cycles))
    assert l2_device._cycles_per_us(clock) == pytest.approx(1980), "what a launch costs is no part of it"


def test_the_side_stream_is_not_the_one_that_graphs_are_captured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands its streams out in turn: four of these are the one of the capture."""
    handed_out = iter([8, 8, 8, 8, 9, 8])
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=8))
    monkeypatch.setattr(
        l2_device, "Prefetcher", lambda device: SimpleNamespace(_stream=SimpleNamespace(cuda_stream=next(handed_out)))
    )
    found: Any = l2_device._prefetcher_beside_captures(CPU, _Clock())
    assert found._stream.cuda_stream == 9
