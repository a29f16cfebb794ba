"""The table of every place where this package touches SGLang, as data. `docs/hooks.md` is generated from it.

EXTENSIONS are doors that SGLang offers; HOOKS are monkey-patches. Nothing here imports sglang: `apply.py` installs the
rows, `check.py` compares them with a source tree. The rows of the emulation are in `hooks_emulation.py`.
"""

from __future__ import annotations

from sglang_sm120.integration.hook_types import SGLANG_RANGE, Extension, Hook, Stage
from sglang_sm120.integration.hooks_emulation import EMULATION_HOOKS

__all__ = ["EXTENSIONS", "HOOKS", "SGLANG_RANGE", "Extension", "Hook", "Stage", "hook"]

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

_FUSION_PATCH = "0008-layer-boundary-let-a-plugin-fuse-the-all-reduce-with-the-norm.patch"
_FUSION_DOOR = "sglang.srt.layers.layer_boundary.fusions.registered:register_allreduce_fusion"

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
        "all_reduce_slot",
        "sglang.srt.distributed.parallel_state.GroupCoordinator.pcie_ipc_comm",
        "sglang_sm120.integration.all_reduce_slot:Slot",
        "Reductions without a norm behind them: a communicator in the attribute that SGLang keeps for one of PCIe. It "
        "asks the object, and prepares and destroys it; what was there before is kept and asked next.",
    ),
    Extension(
        "l2_phases",
        "torch.nn.Module.register_forward_pre_hook and register_forward_hook, on modules of the loaded model",
        "sglang_sm120.integration.l2_warmer:Warmer",
        "With --sm120-l2: where a phase of a layer begins, while a decode graph is captured. A door of PyTorch's.",
    ),
    Extension(
        "engine_keywords",
        "sglang.srt.entrypoints.engine.Engine.server_args_class",
        "sglang_sm120.integration.server_options:server_args_from_keywords",
        "Lets Engine(...) take the options as keywords; the attribute exists to be overridden.",
    ),
)

_SERVING_HOOKS: tuple[Hook, ...] = (
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
        name="fused_attn_input",
        target="sglang.srt.layers.layer_boundary.fusions.allreduce.attn_input_fusions",
        kind="around",
        entry="sglang_sm120.integration.all_reduce_fusion:attn_input_fusions",
        stage=Stage.ALL_REDUCE,
        reason="Offers our kernel where a layer's input completes the sum that the layer before left: all-reduce, "
        "residual add and RMSNorm in one.",
        parameters=("plan", "read"),
        sources={"0.5.23": "05870f0d84a1a8d9"},
        patch=_FUSION_PATCH,
        door=_FUSION_DOOR,
    ),
    Hook(
        name="fused_ffn_input",
        target="sglang.srt.layers.layer_boundary.fusions.allreduce.ffn_input_fusions",
        kind="around",
        entry="sglang_sm120.integration.all_reduce_fusion:ffn_input_fusions",
        stage=Stage.ALL_REDUCE,
        reason="The same behind attention.",
        parameters=("plan",),
        sources={"0.5.23": "ec13b7d7191bf3e8"},
        patch=_FUSION_PATCH,
        door=_FUSION_DOOR,
    ),
)

HOOKS = (*_SERVING_HOOKS, *EMULATION_HOOKS)
"""In the order in which docs/hooks.md lists them."""


def hook(name: str) -> Hook:
    """The row of that name; KeyError if there is none."""
    return {row.name: row for row in HOOKS}[name]
