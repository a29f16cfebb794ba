"""A child process that builds SGLang's own models on the meta device and says what each tensor takes.

Reads a JSON list of cases from standard input: config, tp, ep, dp, mtp, kv_dtype. Writes a JSON list: `tensors` (name
-> bytes), `cell` (SGLang's KV bytes a token, of its own pool configurator), `state` (linear-attention state a slot), or
`error`. SGLang is told that it is rank 0 of that many GPUs, of compute capability 12.0; nothing is communicated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def main() -> None:
    """Build every case."""
    torch.cuda.get_device_capability = lambda *args: (12, 0)
    import sglang.srt.layers.rotary_embedding.factory as rope

    rope.get_rope_cpu = lambda *args, **kwargs: torch.nn.Identity()
    cases = json.load(sys.stdin)
    print(json.dumps([built(case) for case in cases]), file=sys.stdout)


def built(case: dict[str, Any]) -> dict[str, Any]:
    """One case, or why SGLang refuses it, in `error`."""
    try:
        return build(case)
    except (ValueError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def build(case: dict[str, Any]) -> dict[str, Any]:
    """One case."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.server_args import ServerArgs

    runtime_context.reset_context()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        args = ServerArgs(
            model_path=folder, device="cpu", tp_size=case["tp"], ep_size=case["ep"], attn_dp_size=case["dp"],
            skip_tokenizer_init=True, load_format="dummy", disable_cuda_graph=True,
            disable_shared_experts_fusion=True, kv_cache_dtype=case["kv_dtype"],
            **{"attention_backend": "torch_native", **case.get("args", {})},
        )  # fmt: skip
        args.resolve_once()
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
        groups(runtime_context.get_parallel(), case)
        initialize_dp_attention_flags(args)  # else embeddings are built as without attention data parallelism
        runtime_context.override_platform(is_blackwell=True).install()
        initialize_moe_config()
        config = ModelConfig.from_server_args(args, **({"is_draft_model": True} if case["mtp"] else {}))
        quantization = _get_quantization_config(config, LoadConfig())
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = _initialize_model(config, LoadConfig(), quantization)
        return {"tensors": tensors(model), **pool(config, args, case)}


def groups(parallel: Any, case: dict[str, Any]) -> None:
    """Groups that say how wide they are; where SGLang has one group for two uses, one object."""

    def group(width: int) -> SimpleNamespace:
        return SimpleNamespace(
            world_size=width, rank=0, rank_in_group=0, ranks=list(range(width)), is_first_rank=True, is_last_rank=True,
            device_group=None, cpu_group=None,
        )  # fmt: skip

    tp = group(case["tp"])
    parallel.override_permanently(
        pp_group=group(1), tp_group=tp, attn_cp_group=group(1),
        attn_tp_group=tp if case["dp"] == 1 else group(parallel.attn_tp_size),
        moe_tp_group=tp if case["ep"] == 1 else group(parallel.moe_tp_size),
        moe_ep_group=tp if case["ep"] == case["tp"] else group(parallel.moe_ep_size),
    )  # fmt: skip


def tensors(model: torch.nn.Module) -> dict[str, int]:
    """Parameters as they are after loading: NVFP4 scales once, in their swizzled form."""
    found = {name: one for name, one in model.named_parameters() if not name.startswith("visual.")}
    for name in list(found):
        if name.endswith("_blockscale_swizzled"):
            found.pop(name.replace("_blockscale_swizzled", "_weight_scale"), None)
    return {name: one.numel() * one.element_size() for name, one in found.items()}


def pool(config: Any, args: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What SGLang's pool configurator makes of a token."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor import pool_configurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    layers = config.num_hidden_layers
    hybrid = mambaish_config(config)
    swa = getattr(config, "swa_attention_layer_ids", None)
    algorithm = SpeculativeAlgorithm.EAGLE if case.get("draft_layers") else SpeculativeAlgorithm.NONE
    layer_info = SimpleNamespace(
        start_layer=0, end_layer=layers, num_effective_layers=layers,
        full_attention_layer_ids=getattr(config, "full_attention_layer_ids", None), swa_attention_layer_ids=swa,
    )  # fmt: skip
    kvc = SimpleNamespace(
        model_config=config, server_args=args, layer_info=layer_info,
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
        kv_cache_dtype=torch.float8_e4m3fn if case["kv_dtype"] == "fp8_e4m3" else torch.bfloat16,
        kv_cache_dtype_str=case["kv_dtype"], model_dtype=torch.bfloat16, is_draft_worker=False, pp_size=1, page_size=1,
        spec_algorithm=algorithm, mambaish_config=hybrid, fused_entry_bytes=lambda name: None, device="cpu",
        spec_aux_config=SimpleNamespace(
            eagle_draft_num_layers=case.get("draft_layers"), eagle_draft_swa_num_layers=None
        ),
        sliding_window_size=getattr(config, "sliding_window_size", None),
    )  # fmt: skip
    kind = pool_configurator.HybridSWAPoolConfigurator if swa else pool_configurator.DefaultPoolConfigurator
    made = kind(kvc)
    state = hybrid.mamba2_cache_params.mamba_cache_per_req if hybrid is not None else 0
    return {"cell": made._cell_size, "state": int(state)}


if __name__ == "__main__":
    main()
