"""Rows of the hook table that let SGLang run where there is no SM120 GPU: with --sm120-emulate only."""

from __future__ import annotations

from sglang_sm120.integration.hook_types import Hook, Stage

_EMULATION_ONLY = "Emulates hardware that is not there, for tests and demonstrations; upstream has no use for it."

EMULATION_HOOKS: tuple[Hook, ...] = (
    Hook(
        name="emulate_modelopt_platform",
        target="sglang.srt.layers.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod.__init__",
        kind="around",
        entry="sglang_sm120.integration.emulation:pretend_blackwell",
        stage=Stage.EMULATION,
        reason="ModelOpt NVFP4 layers refuse to be built on a GPU before Blackwell.",
        parameters=("self", "quant_config"),
        sources={"0.5.23": "bd3f0532db658cef"},
        no_patch=_EMULATION_ONLY,
    ),
    Hook(
        name="emulate_compressed_tensors_platform",
        target="sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
        ".get_moe_scheme",
        kind="around",
        entry="sglang_sm120.integration.emulation:pretend_blackwell",
        stage=Stage.EMULATION,
        reason="compressed-tensors NVFP4 layers refuse to be built on a GPU before Blackwell.",
        parameters=("self", "layer", "layer_name"),
        sources={"0.5.23": "298c043c4503d58c"},
        no_patch=_EMULATION_ONLY,
    ),
    Hook(
        name="emulate_compressed_tensors_capability",
        target="sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
        "._check_scheme_supported",
        kind="around",
        entry="sglang_sm120.integration.emulation:capability_suffices",
        stage=Stage.EMULATION,
        reason="The same for its own check of the compute capability, which fails without a CUDA GPU.",
        parameters=("self", "min_capability", "error"),
        sources={"0.5.23": "7760c3d88f8c91bd"},
        no_patch=_EMULATION_ONLY,
    ),
    Hook(
        name="emulate_modelopt_float32",
        target="sglang.srt.layers.quantization.modelopt_quant.ModelOptFp4Config.get_supported_act_dtypes",
        kind="after",
        entry="sglang_sm120.integration.emulation:allow_float32",
        stage=Stage.EMULATION,
        reason="Lets the emulation compute in float32, so that every token can be compared with a reference.",
        parameters=("cls",),
        sources={"0.5.23": "573f996bdf0a58b4"},
        no_patch=_EMULATION_ONLY,
    ),
    Hook(
        name="emulate_compressed_tensors_float32",
        target="sglang.srt.layers.quantization.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
        ".get_supported_act_dtypes",
        kind="after",
        entry="sglang_sm120.integration.emulation:allow_float32",
        stage=Stage.EMULATION,
        reason="The same for compressed-tensors.",
        parameters=("cls",),
        sources={"0.5.23": "0c45a3aae5a1e60d"},
        no_patch=_EMULATION_ONLY,
    ),
    Hook(
        name="emulate_routed_scaling",
        target="sglang.srt.layers.moe.fused_moe_triton.layer._fuses_routed_scaling_factor_in_topk",
        kind="around",
        entry="sglang_sm120.integration.emulation:leave_routed_scaling_to_model",
        stage=Stage.CPU,
        reason="Off CUDA the models multiply by routed_scaling_factor themselves; folding it into the router weights "
        "too would apply it twice.",
        parameters=("quant_method", "runner_backend"),
        sources={"0.5.23": "3c2c2914dc7914ce"},
        no_patch=_EMULATION_ONLY,
    ),
)
