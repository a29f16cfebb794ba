"""`sglang-sm120 tune` on the CPU with a fake clock: everything but true times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor

from sglang_sm120.bench.moe_cases import relative_error
from sglang_sm120.bench.options import ModelShape
from sglang_sm120.cli import main
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.base import Bound, Choice, LayerSpec
from sglang_sm120.runners.native import NativeRunner, ReferenceRunner
from sglang_sm120.runners.profile import Candidate, Machine, Point, Profile, Shape
from sglang_sm120.tune import measure, run
from sglang_sm120.tune.options import LayerCase, TuneOptions

SMALL = LayerCase(ModelShape("small", 8, 2, 256, 128))
SHAPE = Shape(
    num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, is_gated=True, activation="silu",
    hidden_dtype="bfloat16",
)  # fmt: skip
NATIVE, REFERENCE = Choice("native", "w4a16"), Choice("reference", "w4a16")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a machine without a CUDA GPU only")


class FakeTimer:
    """A clock on which what is captured first is fastest."""

    captured = 0

    def capture(self, calls: Callable[[], None]) -> Callable[[], None]:
        calls()
        self.captured += 1
        us = 100.0 * self.captured
        return lambda: us  # type: ignore[return-value]

    def elapsed_us(self, replay: Callable[[], Any], count: int) -> float:
        return replay() * count


class Scaled(NativeRunner):
    """Our kernels, and every result too large by a twentieth."""

    name = "scaled"
    numerics = ("w4a16",)
    factor: ClassVar[float] = 1.05

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        bound = super().bind(weights, spec, numerics)
        return lambda *args: bound(*args) * self.factor


class Breaks(Scaled):
    """Covers everything, it says, and fails when called."""

    name = "breaks"
    error: ClassVar[BaseException] = RuntimeError("no such\ninstruction")

    def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
        def call(hidden_states: Tensor, *rest: Any) -> Tensor:
            raise self.error

        return call


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry with our kernels and the reference alone; to be added to."""
    found: dict[str, Any] = {"native": NativeRunner(), "reference": ReferenceRunner()}
    for module in (measure, run):
        monkeypatch.setattr(module, "RUNNERS", found)
    return found


def tune(path: Path, timer: Any = None, **changes: Any) -> tuple[int, str, Profile]:
    """Exit code, what was printed, and the profile."""
    chosen: dict[str, Any] = {"layers": (SMALL,), "tokens": (1, 3), "numerics": "w4a16", "output": str(path)}
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    code = run.run(TuneOptions(**(chosen | changes)), console, timer or FakeTimer())
    return code, console.export_text(), profiles.read(path)


def of(profile: Profile, tokens: int, shape: Shape = SHAPE) -> dict[Choice, Candidate]:
    layer = profile.layer(shape)
    assert layer is not None
    (point,) = (point for point in layer.points if point.tokens == tokens)
    return {candidate.choice: candidate for candidate in point.candidates}


def stored(path: Path, shape: Shape, *tokens: int, **machine: Any) -> Profile:
    """A profile in the file, of this machine but for `machine`."""
    here = profiles.current_machine()
    profile = Profile(
        format=profiles.FORMAT, created="2026-01-01T00:00:00+00:00", command="sglang-sm120 tune",
        machine=Machine(**({name: getattr(here, name) for name in here.__struct_fields__} | machine)),
        layers=[profiles.Layer(shape=shape, points=[Point(tokens=n, candidates=[]) for n in tokens])],
    )  # fmt: skip
    profiles.write(profile, path)
    return profile


@needs_no_gpu
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_without_a_gpu_there_is_one_clear_error(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    assert main(["tune", "--model", "8,2,256,128", "--output", str(path), *more]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 3
    assert "a CUDA GPU" in error
    assert "--from-profile" in error
    assert not path.exists()


def test_a_whole_run(runners: dict[str, Any], tmp_path: Path) -> None:
    path, picture = tmp_path / "profile.json", tmp_path / "picture.png"
    code, text, profile = tune(path, numerics="auto", plot=str(picture))
    assert code == 0
    assert profile.machine == profiles.current_machine()
    for tokens in (1, 3):
        found = of(profile, tokens)
        assert list(found) == [NATIVE, ("native", "w4a4"), ("reference", "w4a4"), REFERENCE]
        for candidate in found.values():
            assert not candidate.reason
            assert len(candidate.samples_us) == 9
            assert candidate.relative_error is not None
            assert candidate.relative_error < (0.02 if candidate.numerics == "w4a16" else 0.25)
        assert found[REFERENCE].relative_error == 0
    assert "native w4a16 for every batch" in text
    assert f"wrote {path}" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_time_is_of_one_call(runners: dict[str, Any], tmp_path: Path) -> None:
    _, _, profile = tune(tmp_path / "profile.json", tokens=(3,))
    bench = measure.LayerBench(SMALL, TuneOptions(), torch.device("cpu"), run._HOST_L2_BYTES)
    calls = len(bench.inputs(3).ids)
    assert calls >= 4
    assert not bench.warm_tokens
    assert of(profile, 3)[NATIVE].samples_us == pytest.approx([100.0 / calls] * 9)
    assert of(profile, 3)[REFERENCE].samples_us == pytest.approx([200.0] * 9), "one call a replay"


def test_what_is_wrong_or_breaks_is_not_timed_and_named(runners: dict[str, Any], tmp_path: Path) -> None:
    runners |= {"scaled": Scaled(), "breaks": Breaks()}
    timer = FakeTimer()
    code, text, profile = tune(tmp_path / "profile.json", timer)
    assert code == 1
    assert timer.captured == 4, "two right ones at two counts: no other came near the clock"
    found = of(profile, 3)
    wrong, broken = found["scaled", "w4a16"], found["breaks", "w4a16"]
    assert not wrong.samples_us
    assert wrong.failed
    assert wrong.reason.startswith("WRONG, not timed: relative error 5.0")
    assert "bound 0.02" in wrong.reason
    assert wrong.relative_error == pytest.approx(0.05, rel=0.2)
    assert broken.reason == "failed: RuntimeError: no such instruction"
    assert broken.failed
    assert not broken.samples_us
    assert found[NATIVE].samples_us
    assert "3 tokens, scaled w4a16: WRONG, not timed" in text
    assert "3 tokens, breaks w4a16: failed: RuntimeError" in text


def test_what_the_timed_replays_left_is_checked_too(runners: dict[str, Any], tmp_path: Path) -> None:
    outputs: list[Tensor] = []

    class Kept(Scaled):
        factor = 1.0

        def bind(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> Bound:
            bound = super().bind(weights, spec, numerics)

            def call(*args: Any) -> Tensor:
                outputs.append(bound(*args))
                return outputs[-1]

            return call

    class Spoils(FakeTimer):
        def elapsed_us(self, replay: Callable[[], Any], count: int) -> float:
            outputs[-1].zero_()
            return super().elapsed_us(replay, count)

    runners["kept"] = Kept()
    code, _, profile = tune(tmp_path / "profile.json", Spoils(), tokens=(3,))
    assert code == 1
    assert of(profile, 3)["kept", "w4a16"].reason.startswith("WRONG, not timed: relative error 1.0")
    assert of(profile, 3)[NATIVE].samples_us


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_wrong(value: float, runners: dict[str, Any], tmp_path: Path) -> None:
    runners["scaled"] = type("NotFinite", (Scaled,), {"factor": value})()
    _, _, profile = tune(tmp_path / "profile.json", tokens=(3,))
    found = of(profile, 3)["scaled", "w4a16"]
    assert (found.failed, found.relative_error) == (True, None)


def test_the_whole_batch_has_a_bound_where_a_token_has_much_room() -> None:
    want = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    one = want.clone()
    one[5] *= 1.15
    assert measure.compare(one, want, "w4a4")[1] == ""
    assert "of the batch, bound 0.063" in measure.compare(want * 1.1, want, "w4a4")[1]
    assert "of a token, bound 0.02" in measure.compare(one, want, "w4a16")[1]


def test_a_token_without_an_expert_here_is_right_if_it_is_zero() -> None:
    want = torch.ones(2, 4)
    want[1] = 0
    assert relative_error(want.clone(), want) == 0
    assert relative_error(want + torch.tensor([[0.0], [1e-30]]), want) == float("inf")


def test_the_reference_is_timed_where_it_is_quick_or_alone(runners: dict[str, Any], tmp_path: Path) -> None:
    tokens = measure.REFERENCE_TOKENS
    changes: dict[str, Any] = {"tokens": (tokens, tokens + 1), "repeat": 7}
    _, text, profile = tune(tmp_path / "a.json", **changes)
    assert of(profile, tokens)[REFERENCE].samples_us
    assert not of(profile, tokens + 1)[REFERENCE].samples_us
    assert "reference w4a16 not timed at 65 tokens: timed up to 64 tokens only; --with-reference" in text
    _, _, profile = tune(tmp_path / "b.json", **changes, with_reference=True)
    assert of(profile, tokens + 1)[REFERENCE].samples_us
    runners["native"] = Breaks()
    _, _, profile = tune(tmp_path / "c.json", **changes)
    assert of(profile, tokens + 1)[REFERENCE].samples_us


def test_what_does_not_cover_a_layer_says_why(runners: dict[str, Any], tmp_path: Path) -> None:
    class Small(Scaled):
        factor = 1.0

        def unsupported_reason(self, weights: Any, spec: LayerSpec, numerics: str, num_tokens: int) -> str | None:
            return "up to 1 token only" if num_tokens > 1 else None

    class Absent(Scaled):
        def unavailable_reason(self, device: torch.device) -> str | None:
            return "not installed"

    runners |= {"small": Small(), "absent": Absent()}
    code, text, profile = tune(tmp_path / "profile.json")
    assert code == 0
    assert of(profile, 1)["small", "w4a16"].samples_us
    assert of(profile, 3)["small", "w4a16"].reason == "up to 1 token only"
    assert "absent w4a16 not timed: not installed" in text
    assert "small w4a16 not timed at 3 tokens: up to 1 token only" in text


def test_what_may_be_measured_is_what_was_asked_for(runners: dict[str, Any], tmp_path: Path) -> None:
    _, _, profile = tune(tmp_path / "profile.json", runners=("native",), numerics="w4a4", tokens=(1,))
    assert list(of(profile, 1)) == [("native", "w4a4")]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), UnsupportedError("broken", "a GPU", "another")])
def test_a_run_that_is_stopped_keeps_its_points(stop: BaseException, runners: dict[str, Any], tmp_path: Path) -> None:
    class Stops(FakeTimer):
        def elapsed_us(self, replay: Callable[[], Any], count: int) -> float:
            if self.captured > 2:  # two candidates a point
                raise stop
            return super().elapsed_us(replay, count)

    path = tmp_path / "profile.json"
    stored(path, SHAPE, 3, 70)
    if isinstance(stop, KeyboardInterrupt):
        code, text, profile = tune(path, Stops())
        assert code == 130
        assert f"interrupted; what was measured is in {path}" in text
    else:
        with pytest.raises(UnsupportedError):
            tune(path, Stops())
        profile = profiles.read(path)
    layer = profile.layer(SHAPE)
    assert layer is not None
    assert [point.tokens for point in layer.points] == [1, 3, 70]
    assert of(profile, 1)[NATIVE].samples_us
    assert of(profile, 3) == {}, "the older point is still there"


def test_a_profile_of_this_machine_is_added_to(runners: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    other = Shape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}, "top_k": 3})
    before = stored(path, other, 1, 2, driver="another driver")
    _, _, profile = tune(path)
    assert profile.layers[0] == before.layers[0]
    assert [layer.shape for layer in profile.layers] == [other, SHAPE]
    assert profile.machine.driver == profiles.current_machine().driver
    _, _, again = tune(path, tokens=(2, 3), repeat=7)
    layer = again.layer(SHAPE)
    assert layer is not None
    assert [(point.tokens, len(point.candidates[0].samples_us)) for point in layer.points] == [(1, 9), (2, 7), (3, 7)]


def test_another_machines_profile_is_replaced_only_by_force(runners: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    stored(path, SHAPE, 70, gpu="Test GPU")
    content = path.read_bytes()
    with pytest.raises(ConfigError, match="gpu Test GPU, here") as error:
        tune(path)
    assert "--force" in error.value.fix
    assert path.read_bytes() == content
    _, _, profile = tune(path, force=True)
    assert [point.tokens for point in profile.layers[0].points] == [1, 3]


def test_a_damaged_profile_is_replaced_only_by_force(runners: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"profile\.json") as error:
        tune(path)
    assert "--force" in error.value.fix
    assert path.read_text() == "{"
    assert tune(path, force=True)[0] == 0


def test_a_path_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "profile.json"):
        timer = FakeTimer()
        with pytest.raises(ConfigError, match="profile"):
            tune(path, timer, force=True)
        assert not timer.captured


def test_the_default_output_is_where_a_server_looks(
    runners: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = TuneOptions(layers=(SMALL,), tokens=(1,), runners=("native",), numerics="w4a16")
    assert run.run(options, Console(quiet=True), FakeTimer()) == 0
    assert profiles.read(profiles.default_path()).layer(SHAPE) is not None


def test_experts_of_other_ranks_are_skipped(runners: dict[str, Any], tmp_path: Path) -> None:
    """One expert here of 4, two a token: about half of the tokens have none here."""
    case = LayerCase(ModelShape("ep", 1, 2, 256, 128), num_global_experts=4)
    bench = measure.LayerBench(case, TuneOptions(), torch.device("cpu"), run._HOST_L2_BYTES)
    ids = torch.cat(bench.inputs(40).ids)
    assert ids.unique().tolist() == [0, 1, 2, 3]
    code, _, profile = tune(tmp_path / "profile.json", layers=(case,), tokens=(40,))
    assert code == 0
    shape = Shape(**{**{name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__}, "num_experts": 1})
    assert of(profile, 40, shape)[NATIVE].samples_us


def test_a_dry_run_lists_and_writes_nothing(runners: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = TuneOptions(layers=(SMALL,), numerics="auto", dry_run=True, output=str(path))
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    runners["absent"] = type("Absent", (Scaled,), {"unavailable_reason": lambda self, device: "not installed"})()
    timer = FakeTimer()
    assert run.run(options, console, timer) == 0
    text = console.export_text()
    assert "small: 8 experts, top 2, hidden size 256, intermediate size 128" in text
    assert "native w4a4              covers it at every count" in text
    assert "absent w4a16             does not at every count: not installed" in text
    assert not path.exists()
    assert not timer.captured


def test_a_profile_is_reported_again(
    runners: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "profile.json", tmp_path / "picture.png"
    tune(path)
    assert main(["tune", "--from-profile", str(path), "--plot", str(picture)]) == 0
    assert "native w4a16 for every batch" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    value = json.loads(path.read_text())
    value["layers"][0]["points"][0]["candidates"][0] |= {"samples_us": [], "failed": True, "reason": "WRONG: x"}
    path.write_text(json.dumps(value))
    assert main(["tune", "--from-profile", str(path)]) == 1
    assert "1 tokens, native w4a16: WRONG: x" in capsys.readouterr().out
    assert main(["tune", "--from-profile", str(tmp_path / "absent.json")]) == 1
    assert "absent.json" in capsys.readouterr().err


def test_tuning_beside_a_server_is_refused() -> None:
    gib = 2**30
    run.require_idle(92 * gib, 96 * gib)
    with pytest.raises(UnsupportedError, match=r"other programs hold 80\.0 GiB of the GPU's 96\.0 GiB"):
        run.require_idle(16 * gib, 96 * gib)
