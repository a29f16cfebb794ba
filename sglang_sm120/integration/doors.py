"""How our functions go through the doors that the patches of patches/ add to SGLang. Unused on an unpatched SGLang."""

from __future__ import annotations

from collections.abc import Callable

from sglang_sm120.integration.hooks import hook


def register(door: str, register_function: Callable) -> None:
    """Hand our functions to one door. `door` is the `door` of a row of the hook table."""
    if door == hook("cli_flags").door:
        from sglang_sm120.integration import server_options

        register_function(
            add_cli_args=server_options.add_cli_args,
            attach=server_options.attach_or_exit,
            describe=server_options.describe,
            keywords=server_options.KEYWORDS,
        )
    elif door == hook("process_ready").door:
        from sglang_sm120.integration import lifecycle

        register_function(process_ready=lifecycle.on_process_ready, model_ready=lifecycle.on_model_ready)
    elif door == hook("moe_layer").door:
        from sglang_sm120.integration import moe

        register_function(moe.serve_layer)
    elif door == hook("forward_count").door:
        from sglang_sm120.integration import metrics

        register_function(metrics.observe_forward)
    elif door == hook("fused_attn_input").door:
        from sglang_sm120.integration import all_reduce_fusion

        register_function(all_reduce_fusion.FUSIONS)
    elif door not in (hook("routed_scaling").door, hook("fp4_gemm_backend").door):
        raise KeyError(door)  # those two patches change SGLang itself: there is nothing to hand over
