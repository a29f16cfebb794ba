"""The profile's file, the machine in it, and the table made from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_sm120 import __version__
from sglang_sm120.bench import moe_cases
from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import ConfigError
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.base import Choice, LayerSpec
from sglang_sm120.runners.profile import Candidate, Layer, Machine, Point, Profile, Shape

MACHINE = Machine(
    gpu="Test GPU", capability="9.0", multiprocessors=4, driver="1.2", torch="2.0", triton="3.0", flashinfer=None,
    sglang_sm120="0.1",
)  # fmt: skip
SHAPE = Shape(
    num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, is_gated=True, activation="silu",
    hidden_dtype="bfloat16",
)  # fmt: skip
NATIVE, STOCK, B12X = Choice("native", "w4a16"), Choice("flashinfer_cutlass", "w4a4"), Choice("b12x", "w4a4")


def candidate(choice: Choice, *samples_us: float, **more: Any) -> Candidate:
    return Candidate(runner=choice.runner, numerics=choice.numerics, samples_us=list(samples_us), **more)


def layer(times: dict[int, dict[Choice, float]]) -> Layer:
    """By tokens and choice, one sample each."""
    return Layer(
        shape=SHAPE,
        points=[Point(tokens=n, candidates=[candidate(c, us) for c, us in of.items()]) for n, of in times.items()],
    )


def profile(*layers: Layer) -> Profile:
    return Profile(format=profiles.FORMAT, created="2026-01-01T00:00:00+00:00", command="sglang-sm120 tune",
                   machine=MACHINE, layers=list(layers))  # fmt: skip


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    point = Point(
        tokens=3,
        candidates=[
            candidate(NATIVE, 1.5, 2.25, relative_error=1e-3),
            candidate(STOCK, reason="no GPU"),
            candidate(B12X, reason="WRONG", failed=True),
        ],
    )
    whole = profile(Layer(shape=SHAPE, points=[point]), layer({1: {NATIVE: 0.125}}))
    profiles.write(whole, path)
    assert profiles.read(path) == whole
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/profile"):
        profiles.write(profile(), tmp_path / "file" / "profile.json")


def spoil(tmp_path: Path, change: Any) -> Path:
    """A written profile of two points with something changed in its JSON."""
    path = tmp_path / "profile.json"
    profiles.write(profile(layer({1: {NATIVE: 5.0}, 4: {NATIVE: 6.0}})), path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


CHANGES = {
    "another format": lambda p: p.update(format="other"),
    "an unknown field": lambda p: p.update(more=1),
    "an unknown field deep inside": lambda p: p["layers"][0]["points"][0]["candidates"][0].update(more=1),
    "a missing field": lambda p: p["machine"].pop("gpu"),
    "a wrong type": lambda p: p["layers"][0]["shape"].update(top_k="2"),
    "a time of a wrong type": lambda p: p["layers"][0]["points"][0]["candidates"][0].update(samples_us=["5"]),
    "a negative time": lambda p: p["layers"][0]["points"][0]["candidates"][0].update(samples_us=[5.0, -1.0]),
    "a time of zero": lambda p: p["layers"][0]["points"][1]["candidates"][0].update(samples_us=[0.0]),
    "an infinite time": lambda p: p["layers"][0]["points"][1]["candidates"][0].update(samples_us=[1e999]),
    "not a number": lambda p: p["layers"][0]["points"][1]["candidates"][0].update(samples_us=[math.nan]),
    "descending tokens": lambda p: p["layers"][0]["points"].reverse(),
    "tokens twice": lambda p: p["layers"][0]["points"][1].update(tokens=1),
    "no tokens": lambda p: p["layers"][0]["points"][0].update(tokens=0),
    "no points": lambda p: p["layers"][0].update(points=[]),
}


def test_without_a_change_it_is_read(tmp_path: Path) -> None:
    assert len(profiles.read(spoil(tmp_path, lambda p: None)).layers) == 1


@pytest.mark.parametrize("what", CHANGES)
def test_what_tune_does_not_write_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile\.json") as error:
        profiles.read(spoil(tmp_path, CHANGES[what]))
    assert "sglang-sm120 tune" in error.value.fix


@pytest.mark.parametrize("content", [None, b"", b"no json", b"[]", b"\xff"])
def test_a_file_that_is_no_profile(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        profiles.read(path)


@pytest.mark.parametrize("field", Machine.__struct_fields__)
def test_every_field_of_the_machine_counts_but_the_driver(field: str) -> None:
    value = 5 if field == "multiprocessors" else "other"
    said = MACHINE.mismatch(msgspec.structs.replace(MACHINE, **{field: value}))
    if field == "driver":
        assert said is None
    else:
        assert said == f"{field} {getattr(MACHINE, field) or 'none'}, here {value}"
    assert MACHINE.mismatch(MACHINE) is None


def test_this_machine() -> None:
    machine = profiles.current_machine()
    assert machine.sglang_sm120 == __version__
    assert machine.torch == torch.__version__
    assert machine.mismatch(profiles.current_machine()) is None
    if not torch.cuda.is_available():
        assert (machine.gpu, machine.capability, machine.multiprocessors, machine.driver) == ("cpu", "", 0, "")


def test_where_a_profile_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "moe-profile-nvidia-rtx-pro-6000-blackwell-server-edition.json"
    gpu = "NVIDIA RTX PRO 6000 Blackwell  Server (Edition)"
    assert profiles.default_path(gpu) == tmp_path / "sglang-sm120" / name
    for other in ("", "relative/folder"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert profiles.default_path(gpu) == Path.home() / ".cache" / "sglang-sm120" / name
    gpu = profiles.current_machine().gpu
    assert profiles.default_path() == profiles.default_path(gpu)


def test_a_layer_is_known_by_its_shape() -> None:
    weights = moe_cases.random_weights(
        ModelShape("", 8, 2, 256, 128), torch.device("cpu"), torch.Generator().manual_seed(0)
    )
    spec = LayerSpec(moe_cases.ACTIVATION, torch.bfloat16, 2)
    assert profiles.shape_of(weights, spec) == SHAPE
    whole = profile(layer({1: {NATIVE: 1.0}}))
    assert whole.layer(SHAPE) is whole.layers[0]
    assert whole.layer(msgspec.structs.replace(SHAPE, top_k=1)) is None


def test_the_table_of_times_worked_by_hand() -> None:
    times = {
        1: {NATIVE: 10.0, STOCK: 30.0, B12X: 20.0},
        8: {NATIVE: 20.0, STOCK: 25.0, B12X: 40.0},
        50: {NATIVE: 60.0, STOCK: 35.0, B12X: 45.0},
    }
    auto = profiles.table(layer(times), "auto", "test")
    assert auto is not None
    assert [row.up_to for row in auto.rows] == [2, 20, None]  # sqrt(8) = 2.8, sqrt(400) = 20
    assert [row.ranking for row in auto.rows] == [(NATIVE, B12X, STOCK), (NATIVE, STOCK, B12X), (STOCK, B12X, NATIVE)]
    assert auto.describe() == "native w4a16 up to 20 tokens, flashinfer_cutlass w4a4 above"
    w4a4 = profiles.table(layer(times), "w4a4", "test")
    assert w4a4 is not None
    assert [row.ranking for row in w4a4.rows] == [(B12X, STOCK), (STOCK, B12X), (STOCK, B12X)]
    assert profiles.table(layer({1: {NATIVE: 1.0}}), "w4a4", "test") is None


def test_the_median_decides_and_not_the_mean() -> None:
    points = [Point(tokens=1, candidates=[candidate(NATIVE, 1.0, 2.0, 900.0), candidate(STOCK, 3.0, 3.0, 4.0, 4.0)])]
    found = profiles.table(Layer(shape=SHAPE, points=points), "auto", "test")
    assert found is not None
    assert found.rows[0].ranking == (NATIVE, STOCK)
    assert [c.median_us for c in points[0].candidates] == [2.0, 3.5]
    assert candidate(B12X).median_us is None


def test_what_was_not_timed_is_not_in_the_table() -> None:
    points = [Point(tokens=1, candidates=[candidate(NATIVE, reason="WRONG", failed=True), candidate(STOCK, 3.0)])]
    found = profiles.table(Layer(shape=SHAPE, points=points), "auto", "test")
    assert found is not None
    assert found.choices() == (STOCK,)


times_of = st.dictionaries(
    st.sampled_from([NATIVE, STOCK, B12X, Choice("native", "w4a4"), Choice("reference", "w4a16")]),
    st.floats(min_value=0.1, max_value=1e6),
    max_size=5,
)


@given(
    times=st.dictionaries(st.integers(1, 10_000), times_of, min_size=1, max_size=8),
    numerics=st.sampled_from(["auto", "w4a16", "w4a4"]),
)
def test_at_a_measured_count_the_fastest_is_chosen(times: dict[int, dict[Choice, float]], numerics: str) -> None:
    times = dict(sorted(times.items()))
    allowed = {n: {c: us for c, us in of.items() if numerics in ("auto", c.numerics)} for n, of in times.items()}
    found = profiles.table(layer(times), numerics, "test")
    assert (found is None) == (not any(allowed.values()))
    for tokens, of in allowed.items():
        if found is not None and of:
            ranking = found.ranking(tokens)
            assert of[ranking[0]] == min(of.values())
            assert set(ranking) == set(of)
            assert [of[choice] for choice in ranking] == sorted(of.values())
