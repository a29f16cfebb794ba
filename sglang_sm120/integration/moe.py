"""Our MoE runners inside SGLang's FusedMoE layer: which layers are taken, and which runner serves a call.

A taken layer has a table (runners/table.py): the number of tokens of a batch decides, a shape, so there is nothing to
wait for, and one choice a captured graph. Tensors are looked up at each call, so a weight update that rebinds them is
followed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import moe_tables
from sglang_sm120.integration.expert_counts import ExpertCounts
from sglang_sm120.integration.metrics import METRICS
from sglang_sm120.integration.moe_weights import (
    Reciprocals,
    format_of,
    read_weights,
    require_global_scales,
    require_stock_input_scales,
)
from sglang_sm120.integration.routed_scaling import output_factor, scale_output
from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, Nvfp4MoeWeights
from sglang_sm120.options import Sm120Options
from sglang_sm120.runners.base import STOCK, Bound, Choice, LayerSpec
from sglang_sm120.runners.registry import RUNNERS
from sglang_sm120.runners.table import RunnerTable

logger = logging.getLogger(__name__)

_LAYER_ATTRIBUTE = "_sm120_moe"
_MAX_LISTED = 4
_said: set[str] = set()


class MoeLayer:
    """One FusedMoE layer that we took. Kept on the layer; holds no tensor of its own but reciprocals of scales."""

    def __init__(self, name: str, layer: Any, layer_format: str, spec: LayerSpec, table: RunnerTable) -> None:
        self.name, self.layer, self.format, self.spec, self.table = name, layer, layer_format, spec, table
        self._bound: dict[Choice, Bound] = {}
        self._choices: dict[int, Choice] = {}  # by number of tokens
        self._reciprocals = Reciprocals()
        self._stock_only = False  # while the self-check calls SGLang's own path
        self._expert_counts: ExpertCounts | None = None

    def weights(self, numerics: str) -> Nvfp4MoeWeights:
        """The layer's prepared tensors, as they are now."""
        return read_weights(self.layer, self.format, input_scales=numerics == "w4a4", kept=self._reciprocals)

    def choice(self, num_tokens: int) -> Choice:
        """What serves a batch of this size.

        Raises: UnsupportedError, if everything that the table names was struck.
        """
        found = self._choices.get(num_tokens)
        if found is None:
            ranking = self.table.ranking(num_tokens)
            if not ranking:
                raise UnsupportedError(
                    f"{self.name}: no runner is left for {num_tokens} tokens: "
                    + "; ".join(f"{choice}: {reason}" for choice, reason in self.table.struck.items()),
                    "one that covers the layer and passed the self-check",
                    "use --sm120-moe-backend flashinfer_cutlass, and report this",
                )
            found = self._choices[num_tokens] = ranking[0]
        return found

    def count_experts(self) -> ExpertCounts:
        """From now on, count the experts that each batch touches."""
        weight = self.layer.w13_weight
        self._expert_counts = ExpertCounts(weight.shape[0], self.spec.expert_offset, weight.device)
        return self._expert_counts

    def strike(self, choice: Choice, reason: str) -> None:
        """Never use this choice again."""
        self.table.strike(choice, reason)
        self._choices.clear()

    def bound(self, choice: Choice) -> Bound:
        """The layer by one runner of ours, or by SGLang's own path, without routed_scaling_factor."""
        if choice not in self._bound:
            if choice.runner == STOCK:
                self._bound[choice] = self._run_stock
            else:
                weights = self.weights(choice.numerics)
                self._bound[choice] = RUNNERS[choice.runner].bind(weights, self.spec, choice.numerics)
        return self._bound[choice]

    def __call__(self, dispatch_output: Any) -> Any | None:
        """StandardDispatchOutput -> StandardCombineInput, or None: SGLang's own path is to serve it."""
        if self._stock_only or _is_tuning():
            return None
        if self._expert_counts is not None and dispatch_output.format.is_standard():
            ids = getattr(dispatch_output.topk_output, "topk_ids", None)  # bypassed top-k has none
            if ids is not None:
                self._expert_counts.add(ids)
        choice = self.choice(dispatch_output.hidden_states.shape[0])
        if choice.runner == STOCK:
            return None
        reason = _call_reason(dispatch_output)
        if reason is not None:
            self._decline(reason)
            return None
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        topk = dispatch_output.topk_output
        output = self.bound(choice)(
            dispatch_output.hidden_states, self.weights(choice.numerics), topk.topk_weights, topk.topk_ids
        )
        return StandardCombineInput(hidden_states=scale_output(self.layer, output))

    def _decline(self, reason: str) -> None:
        """SGLang's own path serves the call where it may; said once."""
        if not any(choice.runner == STOCK for choice in self.table.choices()):
            raise UnsupportedError(
                f"MoE layer {self.layer.layer_id}: {reason}",
                "standard dispatch with unquantised hidden states and (ids, weights) of the top-k experts",
                "use --sm120-moe-backend flashinfer_cutlass",
            )
        if reason not in _said:
            _said.add(reason)
            METRICS.fallback(reason)
            logger.info("sglang-sm120: left to SGLang's own MoE path: %s", reason)

    def _run_stock(
        self, hidden_states: torch.Tensor, _weights: Nvfp4MoeWeights, router: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        self._stock_only = True
        try:
            dispatched = StandardDispatchOutput(hidden_states, None, StandardTopKOutput(router, ids, None))
            output = self.layer.run_moe_core(dispatched).hidden_states
        finally:
            self._stock_only = False
        factor = output_factor(self.layer, output)
        return output if factor is None else output / factor


def run_moe_core(original: Callable, layer: Any, dispatch_output: Any) -> Any:
    """AROUND FusedMoE.run_moe_core: our runner where it is the choice, else SGLang's."""
    served = serve_layer(layer, dispatch_output)
    return original(layer, dispatch_output) if served is None else served


def serve_layer(layer: Any, dispatch_output: Any) -> Any | None:
    """The combine input of a layer that we took, or None: SGLang's own path serves it."""
    ours = layer.__dict__.get(_LAYER_ATTRIBUTE)
    return None if ours is None else ours(dispatch_output)


def take_layers(
    model: torch.nn.Module,
    options: Sm120Options,
    *,
    is_draft: bool = False,
    max_tokens: int = 8192,
    server_reason: str | None = None,
) -> list[MoeLayer]:
    """Check the NVFP4 MoE layers of a loaded model, take those that our runners may serve, and log a line or two.

    max_tokens: the largest batch. server_reason: what of the server our runners do not cover; the layers are then left
    to SGLang (resolution.py has refused the pair where a runner was asked for by name).

    Raises: ConfigError for damaged global scales; UnsupportedError if a runner was asked for by name and cannot serve
    every NVFP4 layer, or there is none. A draft model may have none.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, FusedMoE)]
    nvfp4 = [(name, layer, layer_format) for name, layer in layers if (layer_format := format_of(layer)) is not None]
    asked = options.sm120_moe_backend
    tables = moe_tables.Tables(options, max_tokens)
    taken: list[MoeLayer] = []
    declined: list[tuple[str, str]] = []  # the layer's name, and why SGLang's own path serves it
    for name, layer, layer_format in nvfp4:
        if layer.runner_backend is None or not layer.runner_backend.is_flashinfer_cutlass():
            declined.append((name, f"its weights are prepared for {layer.runner_backend}"))
            continue
        weights = read_weights(layer, layer_format)
        require_global_scales(name, weights)
        reason = server_reason or _layer_reason(layer)
        ours = reason if reason is not None else _build(name, layer, layer_format, weights, tables)
        if isinstance(ours, str):
            if asked == STOCK or (asked == "auto" and not options.sm120_emulate):
                require_stock_input_scales(name, weights)
            declined.append((name, ours))
            continue
        if any(choice.runner == STOCK for choice in ours.table.choices()):
            require_stock_input_scales(name, weights)
        ours.weights("w4a4")  # what is made once is made now, not inside a graph's capture
        setattr(layer, _LAYER_ATTRIBUTE, ours)
        taken.append(ours)
    if asked not in ("auto", STOCK) and not is_draft and (declined or not nvfp4):
        raise UnsupportedError(
            f"--sm120-moe-backend {asked} serves {len(nvfp4) - len(declined)} of {len(nvfp4)} NVFP4 MoE layers"
            + (f" ({_shorten(declined)})" if declined else ""),
            "every NVFP4 MoE layer of the model, and at least one",
            "use --sm120-moe-backend auto, or another checkpoint",
        )
    for _, reason in declined:
        METRICS.fallback(reason)
    _report("draft model" if is_draft else "model", taken, declined, len(nvfp4), len(layers), max_tokens)
    return taken


def _report(
    what: str, taken: list[MoeLayer], declined: list[tuple[str, str]], num_nvfp4: int, num_layers: int, max_tokens: int
) -> None:
    if not num_nvfp4:
        logger.warning("sglang-sm120: the %s has no NVFP4 MoE layers (of %d): nothing to do", what, num_layers)
        return
    by_table: dict[tuple[str, str], list[MoeLayer]] = {}
    for ours in taken:
        by_table.setdefault((ours.table.describe(), ours.table.source), []).append(ours)
    for (described, source), layers in by_table.items():
        logger.info(
            "sglang-sm120: MoE runners of %d of %d layers of the %s: %s (%s); at most %.0f MiB beside the result for "
            "%d tokens", len(layers), num_nvfp4, what, described, source,
            max(_workspace_bytes(ours, max_tokens) for ours in layers) / 2**20, max_tokens,
        )  # fmt: skip
        for choice, reason in layers[0].table.struck.items():
            logger.info("sglang-sm120: not %s: %s", choice, reason)
    if declined:
        left = f"{len(declined)} of {num_nvfp4} MoE layers of the {what} left to SGLang: {_shorten(declined)}"
        logger.info("sglang-sm120: %s", left)


def _workspace_bytes(ours: MoeLayer, num_tokens: int) -> int:
    """Of what serves the largest batch, if that is a runner of ours: SGLang's own path accounts for itself."""
    choice = ours.choice(num_tokens)
    if choice.runner == STOCK:
        return 0
    return RUNNERS[choice.runner].workspace_bytes(ours.weights("w4a16"), ours.spec, choice.numerics, num_tokens)


def _shorten(declined: list[tuple[str, str]]) -> str:
    more = len(declined) - _MAX_LISTED
    return "; ".join(f"{name}: {reason}" for name, reason in declined[:_MAX_LISTED]) + (
        f"; and {more} more" if more > 0 else ""
    )


def _build(
    name: str, layer: Any, layer_format: str, weights: Nvfp4MoeWeights, tables: moe_tables.Tables
) -> MoeLayer | str:
    """The taken layer, or why no runner of ours can serve it."""
    config = layer.moe_runner_config
    ids_are_global = layer.moe_ep_size > 1 and layer.dispatcher.skip_local_expert_mapping
    spec = LayerSpec(
        activation=MoeActivation(
            name=config.activation,
            alpha=config.gemm1_alpha,
            beta=config.gemm1_beta,
            limit=config.gemm1_clamp_limit or config.swiglu_limit,
        ),
        hidden_dtype=layer.params_dtype,
        top_k=layer.top_k or 1,
        apply_router_weight_on_input=config.apply_router_weight_on_input,
        expert_offset=layer.moe_ep_rank * layer.num_local_experts if ids_are_global else 0,
        num_global_experts=layer.num_experts if ids_are_global else None,
    )
    table = tables.of(name, weights, spec)
    return table if isinstance(table, str) else MoeLayer(name, layer, layer_format, spec, table)


def _layer_reason(layer: Any) -> str | None:
    """What of the layer, apart from its weights, our runners do not cover."""
    config = layer.moe_runner_config
    if config.no_combine:
        return "no_combine is not covered"
    if layer.moe_ep_size > 1 and layer.num_fused_shared_experts:
        return "shared experts fused into the routed ones under expert parallelism are not covered"
    if getattr(layer, "_mega_moe_weights_built", False):
        return "its weights are packed for MegaMoE"
    if "run_moe_core" in layer.__dict__:
        return "run_moe_core is replaced on this layer (LoRA does that)"
    if not hasattr(layer.dispatcher, "skip_local_expert_mapping"):
        return f"dispatcher {type(layer.dispatcher).__name__} is not the standard one"
    return None


def _call_reason(dispatch_output: Any) -> str | None:
    """What of one call our runners do not cover."""
    from sglang.srt.layers.moe.topk import TopKOutputChecker

    if not dispatch_output.format.is_standard():
        return f"dispatch format {dispatch_output.format}"
    if dispatch_output.hidden_states_scale is not None:
        return "hidden states quantised before dispatch"
    if not TopKOutputChecker.format_is_standard(dispatch_output.topk_output):
        return f"top-k format {dispatch_output.topk_output.format}"
    return None


def _is_tuning() -> bool:
    """Whether FlashInfer is tuning its kernels just now: it has to see the calls, or the stock path stays untuned."""
    autotuner = sys.modules.get("flashinfer.autotuner")
    return autotuner is not None and autotuner.AutoTuner.get().is_tuning_mode
