"""Checks in the launching process, before any weight is read, and the one setting that we resolve for the user."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

from sglang_sm120.errors import ConfigError, Sm120Error, UnsupportedError
from sglang_sm120.integration import all_reduce_rules, apply, l2_rules
from sglang_sm120.options import ATTRIBUTE, Sm120Options, asked_for, options_of
from sglang_sm120.plan.checkpoint import CheckpointFacts, inspect_checkpoint

logger = logging.getLogger(__name__)

_SOURCE = "sglang-sm120"
_registered = False
_look: Callable[[], None] | None = None


def register(look: Callable[[], None] | None = None) -> None:
    """Wrap SGLang's MoE resolution step (a supported door), once.

    look: called once before the first server's checks; it says what may be wrong with the machine, and stops nothing.
    """
    global _registered, _look
    if not _registered:
        _look = look
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook("handle_moe_kernel_config")(resolve_moe)
        _registered = True


def resolve_moe(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check machine, hooks, model and topology; select the CUTLASS weight layout for NVFP4 experts."""
    try:
        options = options_of(server_args)
        if options.enable_sm120_opts:
            setattr(server_args, ATTRIBUTE, options)
            _prepare(server_args, options)
    except Sm120Error as error:
        if asked_for(sys.argv, {}):  # a command line gets the message alone, a program the exception
            sys.exit(str(error))
        raise
    previous(server_args)


def _prepare(server_args: Any, options: Sm120Options) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    apply.require_tree()
    _look_once()
    require_machine(options)
    view = resolving_view(server_args)
    all_reduce_rules.require(options, view)
    l2_rules.require(options, view)
    facts = inspect_checkpoint(view.model_path)
    if facts is not None:
        _require_checkpoint(facts, view, options)
        if facts.nvfp4_format:
            options = _resolve_from_checkpoint(server_args, view, facts, options)
    _resolve_backend(server_args, view, facts, options)
    problem = uncovered(view)
    if problem is not None and options.needs_own_runner:
        raise problem
    if options.sm120_emulate:
        _resolve_emulation(server_args, view)


def _look_once() -> None:
    global _look
    look, _look = _look, None
    if look is not None:
        look()


def require_machine(options: Sm120Options) -> None:
    """Raises UnsupportedError unless this machine has an SM120 GPU or emulation was asked for."""
    from sglang.srt.runtime_context import get_platform

    if options.sm120_emulate or get_platform().is_sm120:
        return
    from sglang_sm120.device import current_device

    raise UnsupportedError(
        f"this machine has {current_device().describe()}",
        "an SM120 GPU (RTX PRO 6000 Blackwell, RTX 5090) or SM121, compute capability 12.x",
        "drop --enable-sm120-opts here, or add --sm120-emulate to try the package slowly without such a GPU",
    )


def _require_checkpoint(facts: CheckpointFacts, view: Any, options: Sm120Options) -> None:
    if facts.weight_problems:
        raise ConfigError(
            f"{facts.path}: " + "; ".join(problem.found for problem in facts.weight_problems),
            "NVFP4 experts: e4m3 scales, one per 16 elements, and global scales that are finite and above zero",
            facts.weight_problems[0].fix,
        )
    if facts.input_problems and _needs_input_scales(facts, options):
        raise ConfigError(
            f"{facts.path}: " + "; ".join(problem.found for problem in facts.input_problems),
            "activation scales that are finite and above zero, for W4A4",
            facts.input_problems[0].fix,
        )
    if facts.nvfp4_format is None and options.sm120_moe_backend != "auto":
        raise UnsupportedError(
            f"{facts.path} has no NVFP4 experts",
            f"an NVFP4 mixture-of-experts checkpoint for --sm120-moe-backend {options.sm120_moe_backend}",
            "drop --sm120-moe-backend, or serve an NVFP4 checkpoint (ModelOpt or compressed-tensors)",
        )
    if facts.num_experts and view.ep_size > 1 and facts.num_experts % view.ep_size:
        divisors = [n for n in range(1, facts.num_experts + 1) if facts.num_experts % n == 0 and n <= 64]
        raise ConfigError(
            f"{facts.num_experts} experts with --ep-size {view.ep_size}",
            "an expert-parallel size that divides the number of experts",
            f"use one of {', '.join(map(str, divisors))}",
        )


def _needs_input_scales(facts: CheckpointFacts, options: Sm120Options) -> bool:
    """Whether this server would quantise activations under the checkpoint's scales."""
    if options.needs_own_runner:
        return options.sm120_moe_numerics == "w4a4"
    if options.sm120_moe_backend == "flashinfer_cutlass":
        return True
    if options.sm120_moe_numerics == "w4a16":
        return False
    # Without any the layers are served in W4A16; one that is zero or NaN gives garbage on the stock path.
    return not all(problem.missing for problem in facts.input_problems)


def _resolve_backend(server_args: Any, view: Any, facts: CheckpointFacts | None, options: Sm120Options) -> None:
    """Field report 29: with the runner on auto, stock SGLang serves NVFP4 on SM120 only if --quantization is given."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    requested = view.moe_runner_backend
    is_modelopt = (facts is not None and facts.nvfp4_format == "modelopt") or view.quantization in (
        "modelopt_fp4",
        "modelopt_mixed",
    )
    if is_modelopt and requested == "auto":
        declare_resolution(server_args, _SOURCE, moe_runner_backend="flashinfer_cutlass")
    elif requested not in ("auto", "flashinfer_cutlass"):
        if options.sm120_moe_backend != "auto":
            raise ConfigError(
                f"--moe-runner-backend {requested} with --sm120-moe-backend {options.sm120_moe_backend}",
                "the weight layout of flashinfer_cutlass, which our runners read",
                "drop --moe-runner-backend, or drop --sm120-moe-backend",
            )
        logger.warning("sglang-sm120: MoE layers are left to --moe-runner-backend %s, as asked", requested)


def uncovered(view: Any) -> UnsupportedError | None:
    """What of a server our MoE runners do not cover. On auto its layers are left to SGLang."""
    if view.moe_a2a_backend != "none":
        return UnsupportedError(
            f"--moe-a2a-backend {view.moe_a2a_backend}",
            "the standard dispatcher (none) for our MoE runners",
            "drop --moe-a2a-backend, or use --sm120-moe-backend flashinfer_cutlass",
        )
    if view.startup_weight_load_mode != "serial":
        return UnsupportedError(
            f"--startup-weight-load-mode {view.startup_weight_load_mode}",
            "weights that are there when the model is built, to be checked",
            "drop --startup-weight-load-mode, or use --sm120-moe-backend flashinfer_cutlass",
        )
    if view.enable_eplb:
        return UnsupportedError(
            "--enable-eplb",
            "experts that stay where they are: expert rebalancing was not tested with our MoE runners",
            "drop --enable-eplb, or use --sm120-moe-backend flashinfer_cutlass",
        )
    if view.enable_lora or view.lora_paths:
        return UnsupportedError(
            "LoRA adapters, which replace the MoE layer's core",
            "a server without LoRA for our MoE runners",
            "drop the LoRA flags, or use --sm120-moe-backend flashinfer_cutlass",
        )
    return None


def _resolve_from_checkpoint(
    server_args: Any, view: Any, facts: CheckpointFacts, options: Sm120Options
) -> Sm120Options:
    """Settings that only the files tell; the options as they are after that."""
    if facts.has_plain_shared_experts:
        _keep_shared_experts_apart(server_args, view)
    stock = options.sm120_moe_backend == "flashinfer_cutlass"
    if not stock and options.sm120_moe_numerics == "auto" and not facts.has_input_scales:
        logger.info("sglang-sm120: the checkpoint has no activation scales: its experts are served in W4A16")
        # SGLang fills a missing scale with 1.0, so the loaded layer would not show it.
        options = dataclasses.replace(options, sm120_moe_numerics="w4a16")
        setattr(server_args, ATTRIBUTE, options)
    return options


def _keep_shared_experts_apart(server_args: Any, view: Any) -> None:
    """Field report 24: fused into the NVFP4 experts, a BF16 shared expert does not fit their packed tensors."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if view.enforce_shared_experts_fusion:
        raise ConfigError(
            "--enforce-shared-experts-fusion with shared experts that are not NVFP4",
            "shared experts of the routed experts' own format, to be fused into them",
            "drop --enforce-shared-experts-fusion",
        )
    if not view.disable_shared_experts_fusion:
        logger.info("sglang-sm120: shared experts are not NVFP4, so they are not fused into the routed ones")
        declare_resolution(server_args, _SOURCE, disable_shared_experts_fusion=True)


def _resolve_emulation(server_args: Any, view: Any) -> None:
    """Settings without which SGLang reaches for kernels that an emulating machine lacks; explicit ones are kept."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.runtime_context import get_platform

    if not get_platform().has_flashinfer and not view.disable_flashinfer_autotune:
        declare_resolution(server_args, _SOURCE, disable_flashinfer_autotune=True)
