"""FlashInfer CUTLASS and b12x behind our interface, against fakes that compute what the real ones are documented to."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.moe.layer import MoeActivation
from sglang_sm120.runners import b12x, flashinfer_cutlass, handover
from sglang_sm120.runners.base import LayerSpec
from sglang_sm120.runners.registry import RUNNERS
from tests.runners.fake_kernels import FakeB12x, FakeFlashinfer

from moe_oracle import Layer, assert_close, inputs, layer, oracle, tensors_of  # isort: skip  # fake_kernels finds it

E, H, K = 4, 128, 2
INNER = {True: 64, False: 128}  # intermediate size, by whether the layer is gated
SPEC = LayerSpec(MoeActivation("silu"), torch.bfloat16, K)
NAMES = ("flashinfer_cutlass", "b12x")
every_runner = pytest.mark.parametrize("name", NAMES)
EXACT = 2e-6  # a float64 result, by two ways


def shared(gated: bool = True, per_expert: bool = False) -> Layer:
    """Input scales are powers of two, so that a reciprocal is exact; gate and up share a global scale."""
    base = layer(E, H, INNER[gated], gated)
    rng = np.random.default_rng(7)
    scales = {
        name: np.exp2(rng.permutation(E) - exponent if per_expert else np.full(1, -exponent)).astype(np.float32)
        for name, exponent in (("w13", 9), ("w2", 7))
    }
    s2 = base.s2 | ({"gate": base.s2["up"]} if gated else {})
    return dataclasses.replace(base, s2=s2, input_scale=scales)


def for_oracle(lay: Layer) -> Layer:
    return dataclasses.replace(
        lay, input_scale={name: np.broadcast_to(scale, E) for name, scale in lay.input_scale.items()}
    )


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both packages faked, on a machine that can use them."""
    flashinfer, small = FakeFlashinfer(), FakeB12x()
    for module in (flashinfer_cutlass, b12x):
        monkeypatch.setattr(module, "gpu_reason", lambda device: None)
    monkeypatch.setattr(flashinfer_cutlass, "flashinfer_reason", lambda: None)
    monkeypatch.setattr(b12x, "b12x_package_reason", lambda: None)
    monkeypatch.setattr(flashinfer_cutlass, "_load", lambda: flashinfer)
    monkeypatch.setattr(flashinfer_cutlass, "_autotune", flashinfer.autotune)
    monkeypatch.setattr(b12x, "_load", lambda: small)
    b12x.planned.cache_clear()
    yield SimpleNamespace(flashinfer_cutlass=flashinfer, b12x=small)
    b12x.planned.cache_clear()


def run(fakes, name, weights, spec=SPEC, tokens=5, held=None, **changes):
    """(the float64 result of the fake, what the runner gave, the inputs)"""
    x, router, ids = inputs(tokens, spec.top_k, E if held is None else held, H, spec.hidden_dtype)
    given = {"x": x, "router": router, "ids": ids} | changes
    got = RUNNERS[name].bind(weights, spec, "w4a4")(given["x"], weights, given["router"], given["ids"])
    return torch.from_numpy(getattr(fakes, name).exact[-1]), got, given


def want(given, lay, spec=SPEC, **more) -> torch.Tensor:
    return oracle(given["x"], for_oracle(lay), given["router"], given["ids"], spec.activation, "w4a4", **more)


@every_runner
@pytest.mark.parametrize("per_expert", [False, True], ids=["scalar", "per_expert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_layer(fakes, name: str, per_expert: bool, dtype: torch.dtype) -> None:
    lay, spec = shared(per_expert=per_expert), dataclasses.replace(SPEC, hidden_dtype=dtype)
    exact, got, given = run(fakes, name, lay.weights(), spec)
    assert_close(exact, want(given, lay, spec), EXACT)
    assert got.dtype == dtype
    reference = RUNNERS["reference"].bind(lay.weights(), spec, "w4a4")
    assert_close(got, reference(given["x"], lay.weights(), given["router"], given["ids"]).double(), 2**-7)


@every_runner
def test_an_ungated_layer_and_a_clamped_one(fakes, name: str) -> None:
    lay, spec = shared(gated=False), dataclasses.replace(SPEC, activation=MoeActivation("relu2"))
    exact, _, given = run(fakes, name, lay.weights(), spec)
    assert_close(exact, want(given, lay, spec), EXACT)
    lay, spec = shared(), dataclasses.replace(SPEC, activation=MoeActivation("silu", limit=0.5))
    exact, _, given = run(fakes, name, lay.weights(), spec)
    assert_close(exact, want(given, lay, spec), EXACT)
    assert (exact - want(given, lay)).norm() > 0.05 * exact.norm(), "the limit matters here"


def test_a_clamp_with_alpha_and_beta_is_cutlass_only(fakes) -> None:
    lay = shared()
    spec = dataclasses.replace(SPEC, activation=MoeActivation("silu", alpha=1.7, limit=0.7))
    exact, _, given = run(fakes, "flashinfer_cutlass", lay.weights(), spec)
    assert_close(exact, want(given, lay, spec), EXACT)
    assert "rotate" in RUNNERS["b12x"].unsupported_reason(lay.weights(), spec, "w4a4", 1)


@every_runner
def test_skipped_slots_and_an_empty_batch(fakes, name: str) -> None:
    lay, ids = shared(), torch.tensor([[0, -1], [-1, -1], [3, 2], [-1, 1]], dtype=torch.int64)
    exact, got, given = run(fakes, name, lay.weights(), tokens=4, ids=ids)
    assert_close(exact, want(given, lay), EXACT)
    assert (got[1] == 0).all()
    calls = len(getattr(fakes, name).exact)
    empty = torch.empty(0, H, dtype=torch.bfloat16)
    bound = RUNNERS[name].bind(lay.weights(), SPEC, "w4a4")
    assert bound(empty, lay.weights(), torch.empty(0, K), torch.empty(0, K, dtype=torch.int32)).shape == (0, H)
    assert len(getattr(fakes, name).exact) == calls


@every_runner
def test_the_router_weight_on_the_input(fakes, name: str) -> None:
    lay, spec = shared(), dataclasses.replace(SPEC, top_k=1, apply_router_weight_on_input=True)
    exact, _, given = run(fakes, name, lay.weights(), spec)
    scaled = given | {"x": given["x"] * given["router"].to(torch.bfloat16), "router": torch.ones(5, 1)}
    assert_close(exact, want(scaled, lay, spec), EXACT)
    assert (exact - want(given, lay, spec)).norm() > 1e-3 * exact.norm(), "before and after are not the same"


def test_expert_parallel_ids_are_global_in_cutlass_and_refused_by_b12x(fakes) -> None:
    lay, spec = shared(), dataclasses.replace(SPEC, expert_offset=E, num_global_experts=3 * E)
    exact, _, given = run(fakes, "flashinfer_cutlass", lay.weights(), spec, held=3 * E, tokens=9)
    here = (given["ids"] >= E) & (given["ids"] < 2 * E)
    assert 0 < here.sum() < here.numel()
    assert_close(exact, want(given | {"ids": torch.where(here, given["ids"] - E, -1)}, lay), EXACT)
    assert "global expert ids" in RUNNERS["b12x"].unsupported_reason(lay.weights(), spec, "w4a4", 1)
    for offset, total in ((2, 3 * E), (E, 3 * E - 1)):
        uneven = dataclasses.replace(SPEC, expert_offset=offset, num_global_experts=total)
        reason = RUNNERS["flashinfer_cutlass"].unsupported_reason(lay.weights(), uneven, "w4a4", 1)
        assert "equally many" in reason


def mistaken(name: str, monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let the runner hand over something else than it should."""
    module = {"flashinfer_cutlass": flashinfer_cutlass, "b12x": b12x}[name]
    original = module.weight_arguments
    monkeypatch.setattr(module, "weight_arguments", lambda weights: change(original(weights)))


def _quant_scale(index: int, change):
    def edit(arguments):
        scales = list(arguments["quant_scales"])
        scales[index] = change(scales[index])
        return arguments | {"quant_scales": scales}

    return edit


def _named(key: str, change):
    return lambda arguments: arguments | {key: change(arguments[key])}


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.view(torch.uint8).chunk(2, dim=1)[::-1], dim=1).view(tensor.dtype)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return 1 / scale


def _other_expert(scale: torch.Tensor) -> torch.Tensor:
    return scale.roll(1)


MISTAKES = {
    "flashinfer_cutlass": {
        "in13 not a reciprocal": _quant_scale(0, _inverse),
        "in2 not a reciprocal": _quant_scale(3, _inverse),
        "alpha1 inverted": _quant_scale(2, _inverse),
        "alpha1 without the input scale": _quant_scale(2, lambda alpha: alpha * 512),
        "alpha1 of another expert": _quant_scale(2, _other_expert),
        "alpha2 without the input scale": _quant_scale(5, lambda alpha: alpha * 128),
        "alpha2 of another expert": _quant_scale(5, _other_expert),
        "gate first": _named("fc1_expert_weights", _swap_halves),
        "scales gate first": _quant_scale(1, _swap_halves),
    },
    "b12x": {
        "a1 not a reciprocal": _named("a1_gscale", _inverse),
        "a2 not a reciprocal": _named("a2_gscale", _inverse),
        "global scale times input scale": _named("w1_global_scale", lambda scale: scale / 512),
        "global scale of another expert": _named("w1_global_scale", _other_expert),
        "second global scale inverted": _named("w2_global_scale", _inverse),
        "gate first": _named("w1_fp4", _swap_halves),
        "scales gate first": _named("w1_blockscale", _swap_halves),
    },
}


@pytest.mark.parametrize(("name", "mistake"), [(name, mistake) for name in NAMES for mistake in MISTAKES[name]])
def test_the_comparison_notices(fakes, monkeypatch, name: str, mistake: str) -> None:
    """Otherwise the tests above would prove nothing."""
    lay = shared()
    mistaken(name, monkeypatch, MISTAKES[name][mistake])
    exact, _, given = run(fakes, name, lay.weights())
    right = want(given, lay)
    assert (exact - right).norm() > 0.05 * right.norm()


@every_runner
def test_nothing_is_copied_or_changed(fakes, name: str) -> None:
    weights = shared().weights()
    before = {key: tensor.clone().view(torch.uint8) for key, tensor in tensors_of(weights).items()}
    module = {"flashinfer_cutlass": flashinfer_cutlass, "b12x": b12x}[name]
    run(fakes, name, weights)
    assert all(torch.equal(tensor.view(torch.uint8), before[key]) for key, tensor in tensors_of(weights).items())
    handed = module.weight_arguments(weights)
    flat = [t for value in handed.values() for t in (value if isinstance(value, list) else [value])]
    storages = {t.untyped_storage().data_ptr() for t in flat}
    big = (weights.w13_weight, weights.w13_blockscale, weights.w2_weight, weights.w2_blockscale)
    assert {t.untyped_storage().data_ptr() for t in big} <= storages
    assert sum(t.nbytes for t in flat) <= sum(t.nbytes for t in big) + 4 * 4 * E, "and only a few scales beside them"


@every_runner
def test_other_weights_at_a_call_are_followed(fakes, name: str) -> None:
    """Rebound tensors, and the same ones with other scales in a new object."""
    lay = shared()
    first = lay.weights()
    bound = RUNNERS[name].bind(first, SPEC, "w4a4")
    x, router, ids = inputs(3, K, E, H, torch.bfloat16)
    doubled = dataclasses.replace(lay, s2={key: scale * 2 for key, scale in lay.s2.items()})
    same_storage = dataclasses.replace(
        first, w13_global_scale=first.w13_global_scale * 2, w2_global_scale=first.w2_global_scale * 2,
        w2_input_scale=first.w2_input_scale * 2,
    )  # fmt: skip
    rescaled = dataclasses.replace(doubled, input_scale=lay.input_scale | {"w2": lay.input_scale["w2"] * 2})
    for weights, right in ((first, lay), (same_storage, rescaled), (doubled.weights(), doubled), (first, lay)):
        bound(x, weights, router, ids)
        exact = torch.from_numpy(getattr(fakes, name).exact[-1])
        assert_close(exact, oracle(x, for_oracle(right), router, ids, numerics="w4a4"), EXACT)


@every_runner
@pytest.mark.parametrize(
    ("change", "spec_change", "numerics", "says"),
    [
        ({"w13_order": "gate_up"}, {}, "w4a4", "gate first"),
        ({}, {"hidden_dtype": torch.float32}, "w4a4", "torch.float32"),
        ({}, {"activation": MoeActivation("gelu", limit=None)}, "w4a4", "gelu"),
        ({"w13_input_scale": None}, {}, "w4a4", "no activation scales"),
        ({}, {}, "w4a16", "w4a16"),
    ],
    ids=["order", "dtype", "activation", "scales", "numerics"],
)
def test_what_is_not_covered(fakes, name, change, spec_change, numerics, says) -> None:
    weights = dataclasses.replace(shared().weights(), **change)
    spec = dataclasses.replace(SPEC, **spec_change)
    reason = RUNNERS[name].unsupported_reason(weights, spec, numerics, 1)
    if name == "flashinfer_cutlass" and says == "gelu":
        assert reason is None  # Geglu is one of its activations
        return
    assert reason is not None and says in reason
    with pytest.raises(UnsupportedError, match=says):
        RUNNERS[name].bind(weights, spec, numerics)


@every_runner
def test_different_global_scales_of_gate_and_up_are_refused(fakes, name: str) -> None:
    apart = dataclasses.replace(shared(), s2=layer(E, H, INNER[True]).s2)
    with pytest.raises(UnsupportedError, match="different global scales"):
        RUNNERS[name].bind(apart.weights(), SPEC, "w4a4")


def test_ungated_padding_that_cutlass_does_not_expect() -> None:
    lay = layer(2, H, 64, False)
    spec = LayerSpec(MoeActivation("relu2"), torch.bfloat16, K)
    assert "padding" in RUNNERS["flashinfer_cutlass"].unsupported_reason(lay.weights(), spec, "w4a4", 1)


def test_cutlass_is_tuned_once_and_outside_a_capture(fakes, monkeypatch) -> None:
    weights = shared().weights()
    bound = RUNNERS["flashinfer_cutlass"].bind(weights, SPEC, "w4a4")
    x, router, ids = inputs(3, K, E, H, torch.bfloat16)
    monkeypatch.setattr(flashinfer_cutlass, "is_capturing", lambda device: True)
    bound(x, weights, router, ids)
    assert fakes.flashinfer_cutlass.tuned == 0
    monkeypatch.setattr(flashinfer_cutlass, "is_capturing", lambda device: False)
    for _ in range(2):
        bound(x, weights, router, ids)
    assert fakes.flashinfer_cutlass.tuned == 1
    assert len(fakes.flashinfer_cutlass.exact) == 4


def test_b12x_plans_in_powers_of_two_and_layers_share_plan_and_scratch(fakes, monkeypatch) -> None:
    weights = shared().weights()
    first, second = (RUNNERS["b12x"].bind(weights, SPEC, "w4a4") for _ in range(2))
    batches = {tokens: inputs(tokens, K, E, H, torch.bfloat16) for tokens in (1, 3, 4, 5)}
    for bound in (first, second):
        for x, router, ids in batches.values():
            bound(x, weights, router, ids)
    assert fakes.b12x.planned == [1, 4, 8]
    assert fakes.b12x.prepared == 2
    key = functools.partial(b12x.plan_key, weights, SPEC)
    assert b12x.planned(key(3)).scratch() is b12x.planned(key(4)).scratch()
    assert [key(tokens).max_tokens for tokens in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert RUNNERS["b12x"].workspace_bytes(weights, SPEC, "w4a4", 5) >= 8000
    monkeypatch.setattr(b12x, "is_capturing", lambda device: True)
    x, router, ids = batches[5]
    first(x, weights, router, ids)  # was called before
    with pytest.raises(UnsupportedError, match="6 tokens inside a graph capture"):
        first(*(t if i != 1 else weights for i, t in enumerate((inputs(6, K, E, H, torch.bfloat16)[0], None,
              *inputs(6, K, E, H, torch.bfloat16)[1:]))))  # fmt: skip


@pytest.mark.parametrize("layout", ["up_gate", "gate_up"])
@pytest.mark.parametrize("policy", ["keep_source", "reuse_source"])
def test_a_b12x_plan_that_would_change_the_weights_is_refused(fakes, monkeypatch, layout: str, policy: str) -> None:
    monkeypatch.setattr(fakes.b12x, "storage_policy", policy)
    monkeypatch.setattr(b12x, "W13_LAYOUT", layout)
    reason = RUNNERS["b12x"].unsupported_reason(shared().weights(), SPEC, "w4a4", 1)
    if (layout, policy) == ("up_gate", "keep_source"):
        assert reason is None
    else:
        assert "would change the shared weights" in reason


class TestPackages:
    """Whether FlashInfer, and the package b12x that it installs, are what is there."""

    @pytest.mark.parametrize(
        ("version", "fits"),
        [("0.7.2", True), ("0.7.2+cu130", True), ("0.7.2.post1", True), ("0.7.2rc1", False), ("0.7.1", False),
         ("0.7.3", False), ("0.8.0", False), ("0.7", False)],
    )  # fmt: skip
    def test_versions(self, monkeypatch, version: str, fits: bool) -> None:
        monkeypatch.setattr(handover.metadata, "version", lambda name: version)
        assert (handover.flashinfer_reason() is None) is fits

    def install(self, monkeypatch, tmp_path, files: dict[str, list[str]]) -> None:
        """Distributions with these files, as their metadata folders say; on sys.path, nothing imported."""
        for name, owned in files.items():
            folder = tmp_path / f"{name.replace('-', '_')}-0.7.2.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7.2\n")
            (folder / "RECORD").write_text("".join(f"{file},,\n" for file in owned))
            for file in owned:
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_text("raise ImportError('not to be imported')\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_the_package_that_flashinfer_owns(self, monkeypatch, tmp_path) -> None:
        self.install(monkeypatch, tmp_path, {"flashinfer-python": ["b12x/__init__.py"]})
        assert handover.b12x_package_reason() is None

    def test_pypis_package_over_it(self, monkeypatch, tmp_path) -> None:
        self.install(monkeypatch, tmp_path, {"flashinfer-python": ["b12x/__init__.py"], "b12x": ["b12x/__init__.py"]})
        reason = handover.b12x_package_reason()
        assert "PyPI's b12x 0.7.2" in reason
        assert "pip uninstall -y b12x" in reason

    def test_a_copy_that_nobody_owns(self, monkeypatch, tmp_path) -> None:
        self.install(monkeypatch, tmp_path, {"flashinfer-python": ["b12x/__init__.py"]})
        other = tmp_path / "first" / "b12x"
        other.mkdir(parents=True)
        (other / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / "first"))
        assert "which FlashInfer does not own" in handover.b12x_package_reason()

    def test_a_flashinfer_without_it(self, monkeypatch, tmp_path) -> None:
        self.install(monkeypatch, tmp_path, {"flashinfer-python": ["flashinfer/__init__.py"]})
        assert "has no package b12x" in handover.b12x_package_reason()

    def test_no_gpu(self) -> None:
        cpu = torch.device("cpu")
        for name in NAMES:
            assert "needs an SM120 GPU" in RUNNERS[name].unavailable_reason(cpu)

    @pytest.mark.parametrize(
        ("capability", "fits"), [((12, 0), True), ((12, 1), True), ((10, 0), False), ((9, 0), False)]
    )
    def test_capability(self, monkeypatch, capability: tuple[int, int], fits: bool) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert (handover.gpu_reason(torch.device("cuda", 0)) is None) is fits
