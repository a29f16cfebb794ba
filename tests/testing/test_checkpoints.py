"""Checkpoints for tests: both NVFP4 layouts against an independent decode, SGLang's own readers and transformers."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang_sm120.errors import ConfigError, ContractError, UnsupportedError
from sglang_sm120.testing import checkpoints
from sglang_sm120.testing.checkpoint_reference import expert_modules, load_fp32

STYLES_AND_FORMATS = [(style, fmt) for style in checkpoints.MODEL_STYLES for fmt in checkpoints.FORMATS]
PROMPTS = [[5, 6, 7, 8, 9], [100, 200, 30], [77]]
DAMAGED = "model.layers.1.mlp.experts.2.up_proj"
NAMES = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}


class Made:
    """Every checkpoint of this file, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plain(self, style: str) -> Path:
        path = self.root / style
        return path if path.exists() else checkpoints.write_random_model(path, style, seed=3)

    def nvfp4(self, style: str, fmt: str) -> Path:
        path = self.root / f"{style}-{fmt}"
        return path if path.exists() else checkpoints.quantize_checkpoint(self.plain(style), path, fmt)

    def dequantised(self, style: str, fmt: str) -> Path:
        path = self.root / f"{style}-{fmt}-plain"
        return path if path.exists() else checkpoints.dequantize_checkpoint(self.nvfp4(style, fmt), path)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("checkpoints"))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def decode_e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def decode_e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    assert (exponent, mantissa) != (15, 7), "NaN"
    magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize(("style", "fmt"), STYLES_AND_FORMATS)
def test_experts_decode_to_the_dequantised_values(made, style, fmt):
    stored, plain = tensors_of(made.nvfp4(style, fmt)), tensors_of(made.dequantised(style, fmt))
    packed, block, weight_2, input_2 = NAMES[fmt]
    rng = random.Random(0)
    modules = checkpoints.routed_expert_modules(made.nvfp4(style, fmt))
    assert len(modules) == 2 * 8 * 3  # MoE layers, experts, projections
    for module in rng.sample(modules, 8):
        weight = plain[f"{module}.weight"]
        rows, k_size = weight.shape
        assert weight.dtype == torch.float32
        assert (stored[f"{module}.{packed}"].dtype, stored[f"{module}.{packed}"].shape) == (
            torch.uint8,
            (rows, k_size // 2),
        )
        assert stored[f"{module}.{block}"].dtype == torch.float8_e4m3fn
        assert stored[f"{module}.{block}"].shape == (rows, k_size // 16)
        scalar = stored[f"{module}.{weight_2}"]
        assert scalar.dtype == stored[f"{module}.{input_2}"].dtype == torch.float32
        assert list(scalar.shape) == list(stored[f"{module}.{input_2}"].shape) == ([] if fmt == "modelopt" else [1])
        s2 = scalar.reshape(()) if fmt == "modelopt" else torch.ones(()) / scalar.reshape(())
        scale_bytes = stored[f"{module}.{block}"].view(torch.uint8)
        for _ in range(60):
            n, k = rng.randrange(rows), rng.randrange(k_size)
            byte = int(stored[f"{module}.{packed}"][n, k // 2])
            exact = decode_e2m1(byte >> 4 if k % 2 else byte & 15) * decode_e4m3(int(scale_bytes[n, k // 16]))
            assert torch.equal(weight[n, k], torch.tensor(exact, dtype=torch.float32) * s2), (module, n, k)


@pytest.mark.parametrize(("style", "fmt"), STYLES_AND_FORMATS)
def test_only_the_experts_change_and_they_change_little(made, style, fmt):
    source, stored = tensors_of(made.plain(style)), tensors_of(made.nvfp4(style, fmt))
    plain = tensors_of(made.dequantised(style, fmt))
    experts = {f"{module}.weight" for module in checkpoints.routed_expert_modules(made.plain(style))}
    assert set(plain) == set(source)
    assert {name for name in stored if ".mlp.experts." not in name} == set(source) - experts
    for name, tensor in source.items():
        if name not in experts:
            assert same_bits(stored[name], tensor), name
            assert torch.equal(plain[name], tensor.float()) and plain[name].dtype == torch.float32, name
            continue
        error = (plain[name] - tensor.float()).unflatten(-1, (-1, 16))
        amax = tensor.float().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
        assert ((error.abs() / amax) < 1 / 6 + 1 / 16).all(), name  # half the widest e2m1 step, and e4m3's rounding
        assert 0.05 < error.norm() / tensor.float().norm() < 0.12, name


@pytest.mark.parametrize(("style", "fmt"), STYLES_AND_FORMATS)
def test_transformers_loads_all_of_the_dequantised_checkpoint(made, style, fmt):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        made.dequantised(style, fmt), output_loading_info=True, local_files_only=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert model.dtype == torch.float32
    plain = tensors_of(made.dequantised(style, fmt))
    name, experts = expert_modules(model)[-1]
    assert torch.equal(experts.down_proj[5], plain[f"{name}.5.down_proj.weight"])
    gate_up = torch.cat([plain[f"{name}.5.{projection}.weight"] for projection in ("gate_proj", "up_proj")])
    assert torch.equal(experts.gate_up_proj[5], gate_up)


@pytest.mark.parametrize(("style", "fmt"), STYLES_AND_FORMATS)
def test_sglang_quantises_the_experts_and_nothing_else(made, style, fmt):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from sglang.srt.layers.quantization.utils import is_layer_skipped
    from sglang.srt.model_loader.weight_utils import get_quant_config

    model_config = ModelConfig(model_path=str(made.nvfp4(style, fmt)))
    assert model_config.quantization == {"modelopt": "modelopt_fp4"}.get(fmt, fmt)
    mapping = {  # as the models' classes declare it
        "qwen3_moe": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]},
        "glm4_moe": {},
        "deepseek_v3": {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]},
    }[style]
    config = get_quant_config(model_config, LoadConfig(), mapping)
    if fmt == "modelopt":
        assert config.is_checkpoint_nvfp4_serialized and config.group_size == 16 and not config.is_w4a16

        def ignored(name: str) -> bool:
            return is_layer_skipped(name, config.exclude_modules, mapping) or config.is_layer_excluded(name)
    else:
        scheme = config.target_scheme_map["Linear"]
        assert config._is_fp4a4_nvfp4(scheme["weights"], scheme["input_activations"])

        def ignored(name: str) -> bool:
            return should_ignore_layer(name, config.ignore, mapping)

    attention = ["qkv_proj", "o_proj"]
    if style == "deepseek_v3":
        attention = ["fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"]
    kept = ["lm_head", *(f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in attention)]
    kept += ["model.layers.1.mlp.gate"]
    if style != "qwen3_moe":
        kept += [f"model.layers.0.mlp.{name}" for name in ("gate_up_proj", "down_proj")]
        kept += [f"model.layers.1.mlp.shared_experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert [name for name in kept if not ignored(name)] == []
    quantised = ["model.layers.1.mlp.experts", *(f"model.layers.1.mlp.experts.0.{p}_proj" for p in ("gate", "down"))]
    assert [name for name in quantised if ignored(name)] == []


def test_sglang_reads_the_legacy_modelopt_file_and_weight_only_checkpoints(made, tmp_path):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    legacy = tmp_path / "legacy"
    shutil.copytree(made.nvfp4("qwen3_moe", "modelopt"), legacy)
    config = json.loads((legacy / "config.json").read_text())
    del config["quantization_config"]
    (legacy / "config.json").write_text(json.dumps(config))
    model_config = ModelConfig(model_path=str(legacy))
    assert model_config.quantization == "modelopt_fp4"
    assert "lm_head" in get_quant_config(model_config, LoadConfig(), {}).exclude_modules

    for fmt in checkpoints.FORMATS:
        only = checkpoints.quantize_checkpoint(made.plain("qwen3_moe"), tmp_path / fmt, fmt, w4a16_only=True)
        assert not [name for name in tensors_of(only) if "input" in name and "layernorm" not in name]
        quant_config = get_quant_config(ModelConfig(model_path=str(only)), LoadConfig(), {})
        if fmt == "modelopt":
            assert quant_config.is_w4a16
        else:
            scheme = quant_config.target_scheme_map["Linear"]
            assert quant_config._is_fp4a16_nvfp4(scheme["weights"], scheme["input_activations"])
        plain = checkpoints.dequantize_checkpoint(only, tmp_path / f"{fmt}-plain")
        with pytest.raises(ConfigError, match="nvfp4_input_scales"):
            checkpoints.ReferenceModel(plain, w4a4=True)


@pytest.mark.parametrize("fmt", checkpoints.FORMATS)
def test_gate_and_up_share_a_scale_unless_told_otherwise(made, tmp_path, fmt):
    separate = checkpoints.quantize_checkpoint(
        made.plain("qwen3_moe"), tmp_path / "separate", fmt, separate_gate_up_scales=True, w4a16_only=True
    )
    suffix, source = NAMES[fmt][2], tensors_of(made.plain("qwen3_moe"))
    for directory, equal in ((made.nvfp4("qwen3_moe", fmt), 16), (separate, 0)):
        stored = tensors_of(directory)
        gates = [name for name in stored if name.endswith(f"gate_proj.{suffix}")]
        assert len(gates) == 16
        assert sum(bool(stored[name] == stored[name.replace("gate_proj", "up_proj")]) for name in gates) == equal
        for gate in gates:
            module = gate.removesuffix(f"gate_proj.{suffix}")
            amax = {p: float(source[f"{module}{p}_proj.weight"].abs().max()) for p in ("gate", "up")}
            s2 = (max(amax.values()) if equal else amax["gate"]) / (6 * 448)
            assert float(stored[gate]) == pytest.approx(s2 if fmt == "modelopt" else 1 / s2, rel=1e-6)


def test_sigmoid_models_really_use_bias_and_scaling(made, tmp_path):
    """A test that serves these models must be able to notice a lost bias or routed scaling factor."""
    for style in ("glm4_moe", "deepseek_v3"):
        source = made.plain(style)
        before = checkpoints.ReferenceModel(source).score(PROMPTS[0], PROMPTS[1])
        tensors = tensors_of(source)
        biases = {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
        assert len(biases) == 2 and all(bias.dtype == torch.float32 and bias.std() > 0.03 for bias in biases.values())
        for change in ("bias", "factor"):
            changed = tmp_path / f"{style}-{change}"
            shutil.copytree(source, changed)
            if change == "bias":
                zeros = {name: torch.zeros_like(bias) for name, bias in biases.items()}
                save_file(tensors | zeros, changed / "model.safetensors", metadata={"format": "pt"})
            else:
                config = json.loads((changed / "config.json").read_text())
                config["routed_scaling_factor"] = 1.0
                (changed / "config.json").write_text(json.dumps(config))
            after = checkpoints.ReferenceModel(changed).score(PROMPTS[0], PROMPTS[1])
            assert max(abs(a.logprob - b.logprob) for a, b in zip(before, after, strict=True)) > 0.05, (style, change)


def test_calibration_measures_what_enters_the_experts(made):
    directory = made.plain("glm4_moe")
    batches = checkpoints.random_token_batches(320, batches=2, length=24)
    common = checkpoints.calibrate_input_scales(directory, batches)
    own = checkpoints.calibrate_input_scales(directory, batches, per_expert=True)
    assert set(common) == set(own) == set(checkpoints.routed_expert_modules(directory))
    model = load_fp32(directory)
    seen: dict[str, float] = {}
    for name, module in expert_modules(model):

        def hook(module, args, name=name):
            seen[name] = max(seen.get(name, 0.0), float(args[0].abs().max()))

        module.register_forward_pre_hook(hook)
    with torch.inference_mode():
        for batch in batches:
            model(input_ids=batch)
    for name, amax in seen.items():
        for expert in range(8):
            assert common[f"{name}.{expert}.gate_proj"] == pytest.approx(amax / (6 * 448), rel=1e-5)
            for projection in ("gate_proj", "up_proj", "down_proj"):
                assert own[f"{name}.{expert}.{projection}"] <= common[f"{name}.{expert}.{projection}"]
        down = [own[f"{name}.{expert}.down_proj"] for expert in range(8)]
        assert len(set(down)) > 1 and max(down) == common[f"{name}.0.down_proj"]


def test_serving_scales_are_reduced_as_sglang_does(made, tmp_path):
    source = made.plain("qwen3_moe")
    modules = checkpoints.routed_expert_modules(source)
    scales = {module: 2.0 ** -(6 + i % 5) for i, module in enumerate(modules)}
    for fmt in checkpoints.FORMATS:
        directory = checkpoints.quantize_checkpoint(source, tmp_path / fmt, fmt, input_scales=scales)
        plain = checkpoints.dequantize_checkpoint(directory, tmp_path / f"{fmt}-plain")
        layers = json.loads((plain / checkpoints.INPUT_SCALES_FILE).read_text())
        assert sorted(layers) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        for layer, found in layers.items():
            w13 = [max(scales[f"{layer}.{i}.{name}"] for name in ("gate_proj", "up_proj")) for i in range(8)]
            w2 = [scales[f"{layer}.{i}.down_proj"] for i in range(8)]
            expected = (w13, w2) if fmt == "compressed-tensors" else ([max(w13)] * 8, [max(w2)] * 8)
            assert (found["w13"], found["w2"]) == expected


@pytest.mark.parametrize("style", checkpoints.MODEL_STYLES)
def test_greedy_reference_is_what_transformers_generates(made, style):
    directory = made.dequantised(style, "modelopt")
    outputs = checkpoints.reference_greedy(directory, PROMPTS, 16)
    model = load_fp32(directory)
    model.generation_config.eos_token_id = None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        generated = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert output.tokens == generated.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(generated.logits).float()
        best = logits.sort(-1, descending=True).values
        assert output.logprobs == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-4)
        assert output.top2_gap == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)
    assert len({token for output in outputs for token in output.tokens}) > 16  # no short loop


@pytest.mark.parametrize("style", checkpoints.MODEL_STYLES)
def test_scores_agree_with_the_greedy_reference(made, style):
    model = checkpoints.ReferenceModel(made.dequantised(style, "compressed-tensors"))
    output = model.greedy(PROMPTS[:1], 12)[0]
    scores = model.score(PROMPTS[0], output.tokens)
    assert [score.argmax for score in scores] == output.tokens
    assert [score.logprob for score in scores] == pytest.approx(output.logprobs, abs=1e-4)
    other = [(token + 1) % 320 for token in output.tokens]
    wrong = checkpoints.score_tokens(made.dequantised(style, "compressed-tensors"), PROMPTS[0], other)
    assert len(wrong) == 12 and wrong[0].argmax == output.tokens[0]
    assert all(score.logprob < score.argmax_logprob or score.argmax == o for score, o in zip(wrong, other, strict=True))
    assert wrong[0].argmax_logprob == pytest.approx(output.logprobs[0], abs=1e-4)
    assert wrong[1].argmax_logprob != pytest.approx(output.logprobs[1], abs=1e-3)  # it saw the other first token


@pytest.mark.parametrize(("style", "fmt"), STYLES_AND_FORMATS)
def test_w4a4_reference_is_near_the_w4a16_one_but_not_it(made, style, fmt):
    directory = made.dequantised(style, fmt)
    output = PROMPTS[0] * 8
    exact = checkpoints.score_tokens(directory, PROMPTS[1], output)
    rounded = checkpoints.score_tokens(directory, PROMPTS[1], output, w4a4=True)
    differences = [abs(a.logprob - b.logprob) for a, b in zip(exact, rounded, strict=True)]
    assert 0.01 < sum(differences) / len(differences) < 1.0


def test_w4a4_rounds_both_inputs_of_every_expert(made, tmp_path):
    """Weights of one MoE layer by hand: every input on the NVFP4 grid of the scale that the file names."""
    directory = made.dequantised("qwen3_moe", "modelopt")
    reference = checkpoints.ReferenceModel(directory, w4a4=True)
    name, experts = expert_modules(reference.model)[0]
    scales = json.loads((directory / checkpoints.INPUT_SCALES_FILE).read_text())[name]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[1, 4], [4, 1], [7, 0]]), torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
    with torch.inference_mode():
        found = experts(x, index, weights)
    plain, expected = tensors_of(directory), torch.zeros_like(x)
    for token in range(3):
        for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
            gate, up, down = (plain[f"{name}.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down"))
            rounded = round_to_nvfp4(x[token], scales["w13"][expert])
            hidden = torch.nn.functional.silu(gate @ rounded) * (up @ rounded)
            expected[token] += weight * (down @ round_to_nvfp4(hidden, scales["w2"][expert]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def round_to_nvfp4(x: torch.Tensor, s2: float) -> torch.Tensor:
    """One row, element by element, against all 16 e2m1 values."""
    grid = torch.tensor([decode_e2m1(code) for code in range(16)])
    blocks = x.unflatten(0, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / s2).clamp(max=448).to(torch.float8_e4m3fn).float() * s2
    nearest = (blocks[..., None] / scale[:, None, None] - grid).abs().argmin(-1)
    return (grid[nearest] * scale[:, None]).flatten()


@pytest.mark.parametrize("fmt", checkpoints.FORMATS)
@pytest.mark.parametrize("kind", checkpoints.DAMAGE_KINDS)
def test_damage_breaks_one_tensor_and_the_reader_says_so(made, tmp_path, kind, fmt):
    source = made.nvfp4("qwen3_moe", fmt)
    damaged = checkpoints.damage(source, tmp_path / "damaged", kind, module=DAMAGED)
    packed, block, weight_2, input_2 = (f"{DAMAGED}.{name}" for name in NAMES[fmt])
    before, after = tensors_of(source), tensors_of(damaged)
    gone = set(before) - set(after)
    changed = {name for name in after if name not in before or not same_bits(before[name], after[name])}
    target = {"weight_scale": block, "weight_scale_2": weight_2, "input_scale": input_2}.get(kind.split("_", 1)[1])
    if kind.startswith("missing"):
        assert (gone, changed) == ({target}, set())
    elif kind == "mxfp4_as_nvfp4":
        assert (gone, changed) == (set(), {packed, block})
        assert after[packed].shape == before[packed].shape
        assert (after[block].dtype, after[block].shape) == (torch.uint8, (before[block].shape[0], 128 // 32))
        values = torch.tensor([decode_e2m1(code) for code in range(16)])
        codes = torch.stack([after[packed] & 15, after[packed] >> 4], -1).flatten(1).long()
        mxfp4 = values[codes] * torch.exp2(after[block].float() - 127).repeat_interleave(32, 1)
        weight = tensors_of(made.dequantised("qwen3_moe", fmt))[f"{DAMAGED}.weight"]
        assert (mxfp4 - weight).norm() / weight.norm() < 0.2
    else:
        assert (gone, changed) == (set(), {target})
        value = {"zero": 0.0, "nan": float("nan"), "inf": float("inf")}[kind.split("_")[0]]
        assert (
            after[target].tolist() == pytest.approx(value if fmt == "modelopt" else [value], nan_ok=True)
            and after[target].dtype == torch.float32
        )
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (damaged / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(ConfigError, match=DAMAGED.replace(".", r"\.")):
        checkpoints.dequantize_checkpoint(damaged, tmp_path / "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]  # nothing half written


def test_damage_default_is_the_first_linear(made, tmp_path):
    source = made.nvfp4("glm4_moe", "modelopt")
    damaged = checkpoints.damage(source, tmp_path / "damaged", "missing_weight_scale")
    gone = set(tensors_of(source)) - set(tensors_of(damaged))
    assert gone == {"model.layers.1.mlp.experts.0.gate_proj.weight_scale"}


@pytest.mark.parametrize("fmt", checkpoints.FORMATS)
def test_sharded_checkpoints_give_the_same_tensors(made, tmp_path, fmt):
    """A linear's four tensors may lie in different files, gate and up as well."""
    whole, sharded = made.nvfp4("qwen3_moe", fmt), tmp_path / "sharded"
    for directory, out in ((made.plain("qwen3_moe"), sharded), (whole, tmp_path / "sharded-nvfp4")):
        shutil.copytree(directory, out, ignore=shutil.ignore_patterns("*.safetensors"))
        tensors = sorted(tensors_of(directory).items())
        names: dict[str, str] = {}
        for i in range(3):
            save_file(dict(tensors[i::3]), out / f"model-{i}.safetensors", metadata={"format": "pt"})
            names.update({name: f"model-{i}.safetensors" for name, _ in tensors[i::3]})
        (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    quantised = checkpoints.quantize_checkpoint(sharded, tmp_path / "q", fmt)
    plain = checkpoints.dequantize_checkpoint(tmp_path / "sharded-nvfp4", tmp_path / "d")
    for found, expected in ((quantised, whole), (plain, made.dequantised("qwen3_moe", fmt))):
        tensors, wanted = tensors_of(found), tensors_of(expected)
        assert set(tensors) == set(wanted) and all(same_bits(tensors[name], wanted[name]) for name in wanted)
        index = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
        assert {name: load_file(found / file)[name].shape for name, file in index.items()} == {
            name: tensor.shape for name, tensor in wanted.items()
        }
    assert checkpoints.reference_greedy(plain, PROMPTS[:1], 3)


def test_wrong_requests_are_refused_and_leave_nothing(made, tmp_path):
    source, nvfp4 = made.plain("qwen3_moe"), made.nvfp4("qwen3_moe", "modelopt")
    out = tmp_path / "out"
    with pytest.raises(UnsupportedError, match="mixtral"):
        checkpoints.write_random_model(out, "mixtral")
    for sizes in ({"hidden_size": 96}, {"moe_intermediate_size": 64}, {"num_experts": 1}, {"num_experts_per_tok": 9}):
        with pytest.raises(UnsupportedError, match=next(iter(sizes))):
            checkpoints.write_random_model(out, "qwen3_moe", **sizes)
    with pytest.raises(UnsupportedError, match="gptq"):
        checkpoints.quantize_checkpoint(source, out, "gptq")
    with pytest.raises(ConfigError, match="quantised already"):
        checkpoints.quantize_checkpoint(nvfp4, out, "modelopt")
    with pytest.raises(ContractError, match="input_scales lacks"):
        checkpoints.quantize_checkpoint(source, out, "modelopt", input_scales={"other": 1.0})
    with pytest.raises(ConfigError, match="quant_method None"):
        checkpoints.dequantize_checkpoint(source, out)
    with pytest.raises(UnsupportedError, match="melted"):
        checkpoints.damage(nvfp4, out, "melted")
    with pytest.raises(ConfigError, match="is quantised"):
        checkpoints.ReferenceModel(nvfp4)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="not an empty directory"):
        checkpoints.quantize_checkpoint(source, nvfp4, "modelopt")
    with pytest.raises(ContractError, match="empty"):
        checkpoints.score_tokens(source, [], [1])


def test_same_seed_same_bytes(made, tmp_path):
    again = checkpoints.write_random_model(tmp_path / "again", "deepseek_v3", seed=3)
    other = checkpoints.write_random_model(tmp_path / "other", "deepseek_v3", seed=4)
    first = tensors_of(made.plain("deepseek_v3"))
    assert all(same_bits(tensor, first[name]) for name, tensor in tensors_of(again).items())
    assert not same_bits(tensors_of(other)["lm_head.weight"], first["lm_head.weight"])
