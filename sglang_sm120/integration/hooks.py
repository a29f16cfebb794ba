"""The table of every place where this package touches SGLang, as data. `docs/hooks.md` is generated from it.

EXTENSIONS are doors that SGLang offers; HOOKS are monkey-patches. Nothing here imports sglang: `apply.py` installs the
rows, `check.py` compares them with a source tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

SGLANG_RANGE = ((0, 5, 23), (0, 5, 24))
"""First version that is served, and first that is not (pyproject.toml says the same; a test compares them)."""


class Stage(Enum):
    """Which processes install a hook, and when."""

    PROCESS = "every SGLang process, at plugin load"
    SCHEDULER = "scheduler processes, after the configuration is published"
    EMULATION = "scheduler processes, only with --sm120-emulate"
    CPU = "scheduler processes, only with --sm120-emulate on the CPU"


@dataclass(frozen=True)
class Extension:
    """A supported door: `door` is SGLang's name for it, `entry` is ours."""

    name: str
    door: str
    entry: str
    reason: str


@dataclass(frozen=True)
class Hook:
    """A monkey-patch.

    target: dotted path of the function or method that is wrapped. kind: `after` or `around` (HookRegistry's words).
    entry: our function, `module:name`. parameters: those of the target that the entry relies on. sources: SGLang
    version -> digest of the target's source (see `check.source_digest`); any other source is refused. patch: file in
    patches/ that makes the hook unnecessary, or None and `no_patch` says why. door: attribute, `module:name`, that the
    patched SGLang has; where it is found the door is used and the hook is not installed.
    """

    name: str
    target: str
    kind: str
    entry: str
    stage: Stage
    reason: str
    parameters: tuple[str, ...]
    sources: Mapping[str, str]
    patch: str | None = None
    door: str | None = None
    no_patch: str = ""


_OPTIONS_PATCH = "0001-plugins-let-a-plugin-declare-server-options.patch"
_OPTIONS_DOOR = "sglang.srt.plugins.server_options:register_server_options"
_LIFECYCLE_PATCH = "0002-plugins-tell-plugins-when-a-process-and-a-model-are-ready.patch"
_LIFECYCLE_DOOR = "sglang.srt.plugins.lifecycle:register_lifecycle_callbacks"
_MOE_PATCH = "0003-moe-let-a-plugin-serve-a-fused-moe-layer.patch"
_MOE_DOOR = "sglang.srt.layers.moe.moe_runner.layer_override:register_moe_layer_override"

_SCALING_PATCH = "0005-moe-apply-routed-scaling-for-compressed-tensors-nvfp4.patch"
_SCALING_DOOR = "sglang.srt.layers.moe.moe_runner.flashinfer_cutlass:routed_scaling_left_to_runner"

_FORWARD_PATCH = "0006-model-executor-let-a-plugin-see-each-forward-pass.patch"
_FORWARD_DOOR = "sglang.srt.model_executor.forward_observer:register_forward_observer"

_FP4_PATCH = "0007-quantization-b12x-as-a-choice-of-fp4-gemm-backend-on-sm120.patch"
_FP4_DOOR = "sglang.srt.layers.quantization.flashinfer_b12x:require_flashinfer_b12x"

_EMULATION_ONLY = "Emulates hardware that is not there, for tests and demonstrations; upstream has no use for it."

EXTENSIONS: tuple[Extension, ...] = (
    Extension(
        "plugin",
        "entry point group sglang.srt.plugins",
        "sglang_sm120.plugin:register",
        "SGLang calls it in every process before it parses arguments.",
    ),
    Extension(
        "cpu_platform",
        "entry point group sglang.srt.platforms",
        "sglang_sm120.testing.cpu_platform:activate",
        "Gives SGLang a platform on a machine without a GPU; returns None unless emulation was asked for.",
    ),
    Extension(
        "resolve_moe",
        "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook('handle_moe_kernel_config')",
        "sglang_sm120.integration.resolution:resolve_moe",
        "Checks machine, model and topology before weights load, and selects the CUTLASS weight layout "
        "(stock SGLang leaves NVFP4 without --quantization on a path that fails on SM120).",
    ),
    Extension(
        "fp4_gemm_choice",
        "sglang.srt.arg_groups.choices.add_fp4_gemm_runner_backend_choices",
        "sglang_sm120.integration.fp4_gemm:add_choice",
        "Makes --fp4-gemm-backend take flashinfer_b12x, only where the package was asked for.",
    ),
    Extension(
        "engine_keywords",
        "sglang.srt.entrypoints.engine.Engine.server_args_class",
        "sglang_sm120.integration.server_options:server_args_from_keywords",
        "Lets Engine(...) take the options as keywords; the attribute exists to be overridden.",
    ),
)

HOOKS: tuple[Hook, ...] = (
    Hook(
        name="cli_flags",
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        entry="sglang_sm120.integration.server_options:add_flags",
        stage=Stage.PROCESS,
        reason="Adds the flags of docs/flags.md to `sglang serve`, `launch_server` and `--config` files.",
        parameters=("parser",),
        sources={"0.5.23": "b1b538ce5c0e725d"},
        patch=_OPTIONS_PATCH,
        door=_OPTIONS_DOOR,
    ),
    Hook(
        name="cli_values",
        target="sglang.srt.server_args.ServerArgs.from_cli_args",
        kind="around",
        entry="sglang_sm120.integration.server_options:keep_values",
        stage=Stage.PROCESS,
        reason="Stashes the parsed options on the ServerArgs record, which is pickled into every process.",
        parameters=("cls", "args"),
        sources={"0.5.23": "0a32b5ad2bb2c699"},
        patch=_OPTIONS_PATCH,
        door=_OPTIONS_DOOR,
    ),
    Hook(
        name="server_info",
        target="sglang.srt.server_args.ServerArgs.resolved_dict",
        kind="after",
        entry="sglang_sm120.integration.server_options:report_options",
        stage=Stage.PROCESS,
        reason="Shows the options in /server_info.",
        parameters=("self",),
        sources={"0.5.23": "a6efdff6b1b9cacc"},
        patch=_OPTIONS_PATCH,
        door=_OPTIONS_DOOR,
    ),
    Hook(
        name="process_ready",
        target="sglang.srt.runtime_context.publish",
        kind="after",
        entry="sglang_sm120.integration.lifecycle:process_ready",
        stage=Stage.PROCESS,
        reason="First point where a process knows its role: heavy hooks are installed in schedulers only, and every "
        "process checks that its hooks are live.",
        parameters=("server_args", "role"),
        sources={"0.5.23": "d57279fe62ad6cb5"},
        patch=_LIFECYCLE_PATCH,
        door=_LIFECYCLE_DOOR,
    ),
    Hook(
        name="model_ready",
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        kind="after",
        entry="sglang_sm120.integration.lifecycle:model_ready",
        stage=Stage.SCHEDULER,
        reason="Takes the MoE layers, checks their weights and verifies every hook once the model is built.",
        parameters=("self",),
        sources={"0.5.23": "982540df9822bef8"},
        patch=_LIFECYCLE_PATCH,
        door=_LIFECYCLE_DOOR,
    ),
    Hook(
        name="moe_layer",
        target="sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.run_moe_core",
        kind="around",
        entry="sglang_sm120.integration.moe:run_moe_core",
        stage=Stage.SCHEDULER,
        reason="The one point through which every MoE layer's experts run, after dispatch and before combine.",
        parameters=("self", "dispatch_output"),
        sources={"0.5.23": "3c6c207981d7dde3"},
        patch=_MOE_PATCH,
        door=_MOE_DOOR,
    ),
    Hook(
        name="routed_scaling",
        target="sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe"
        ".CompressedTensorsW4A4Nvfp4MoE.apply_weights",
        kind="around",
        entry="sglang_sm120.integration.routed_scaling:apply_weights",
        stage=Stage.SCHEDULER,
        reason="The stock path drops routed_scaling_factor for compressed-tensors NVFP4 on CUDA (DeepSeek-V3, GLM-4): "
        "plausible but wrong answers.",
        parameters=("self", "layer", "dispatch_output"),
        sources={"0.5.23": "8fc100b80ab07f6d"},
        patch=_SCALING_PATCH,
        door=_SCALING_DOOR,
    ),
    Hook(
        name="forward_count",
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        kind="after",
        entry="sglang_sm120.integration.metrics:count_forward",
        stage=Stage.SCHEDULER,
        reason="Counts a forward pass for /metrics: in the layers Python does not run when a CUDA graph is replayed.",
        parameters=("self", "forward_batch"),
        sources={"0.5.23": "f556cd084e1e41ff"},
        patch=_FORWARD_PATCH,
        door=_FORWARD_DOOR,
    ),
    Hook(
        name="fp4_gemm_backend",
        target="sglang.srt.layers.quantization.fp4_utils.initialize_fp4_gemm_config",
        kind="around",
        entry="sglang_sm120.integration.fp4_gemm:initialize",
        stage=Stage.SCHEDULER,
        reason="Serves dense NVFP4 layers by FlashInfer's b12x GEMM where --fp4-gemm-backend flashinfer_b12x asks for "
        "it: SGLang has no name for it. Any other choice goes to SGLang.",
        parameters=(),
        sources={"0.5.23": "6276f12cacb750f4"},
        patch=_FP4_PATCH,
        door=_FP4_DOOR,
    ),
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


def hook(name: str) -> Hook:
    """The row of that name; KeyError if there is none."""
    return {row.name: row for row in HOOKS}[name]
