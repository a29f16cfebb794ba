"""The table of each MoE layer: from what was asked for by name, the machine's profile, or the shipped default."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang_sm120.errors import ConfigError, Sm120Error
from sglang_sm120.integration.moe_weights import input_scale_fault
from sglang_sm120.kernels.moe.fused_moe.api import Nvfp4MoeWeights
from sglang_sm120.options import Sm120Options
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.base import STOCK, Choice, LayerSpec
from sglang_sm120.runners.registry import RUNNERS
from sglang_sm120.runners.table import Row, RunnerTable, only, shipped_default

logger = logging.getLogger(__name__)

_PROBED_TOKENS = (1, 8, 64, 512)


class Tables:
    """Makes a table a layer, for one model. The profile is read once."""

    def __init__(self, options: Sm120Options, max_tokens: int) -> None:
        self.options, self.max_tokens = options, max_tokens
        self._profile = self._read_profile() if options.sm120_moe_backend == "auto" else None

    def of(self, name: str, weights: Nvfp4MoeWeights, spec: LayerSpec) -> RunnerTable | str:
        """The table of one layer without what does not cover it, or one sentence on why no runner of ours does.

        Raises: ConfigError: W4A4 was asked for, and the activation scales cannot be used.
        """
        numerics = self._numerics(name, weights)
        table = self._wanted(weights, spec, numerics)
        reasons: list[str] = []
        for choice in table.choices():
            reason = self._choice_reason(choice, weights, spec, table)
            if reason is not None:
                table.strike(choice, reason)
                reasons.append(f"{choice}: {reason}")
        if not table.choices():
            return "; ".join(reasons)
        kept = []
        for row in table.rows:  # a row whose choices are all gone is served as its neighbour is
            left = tuple(choice for choice in row.ranking if choice not in table.struck)
            kept.append(Row(row.up_to, left or table.choices()))
        return RunnerTable(tuple(kept), table.source, table.struck)

    def _wanted(self, weights: Nvfp4MoeWeights, spec: LayerSpec, numerics: str) -> RunnerTable:
        asked = self.options.sm120_moe_backend
        if asked != "auto":
            chosen = RUNNERS[asked].numerics[0] if numerics == "auto" else numerics
            if asked == "reference" and numerics == "auto":
                chosen = "w4a16" if input_scale_fault(weights) else "w4a4"
            return only((Choice(asked, chosen),), f"--sm120-moe-backend {asked}")
        if self._profile is not None:
            measured, path = self._profile
            shape = profiles.shape_of(weights, spec)
            layer = measured.layer(shape)
            table = profiles.table(layer, numerics, f"profile {path}") if layer is not None else None
            if table is not None:
                return table
            missing = "no layer of this shape" if layer is None else f"no times in {numerics}"
            said = f"profile {path} has {missing} ({shape}); run `sglang-sm120 tune` for it"
            if self.options.sm120_moe_profile:
                raise ConfigError(said, "measurements of the model's layers", "tune, or drop --sm120-moe-profile")
            logger.info("sglang-sm120: %s; the shipped default is used", said)
        device = weights.w13_weight.device
        if numerics == "auto" and self.options.sm120_emulate and input_scale_fault(weights):
            numerics = "w4a16"
        native = device.type == "cuda" and RUNNERS["native"].unavailable_reason(device) is None
        return shipped_default(is_sm120=not self.options.sm120_emulate, numerics=numerics, native=native)

    def _numerics(self, name: str, weights: Nvfp4MoeWeights) -> str:
        """As asked; W4A4 by name needs usable scales."""
        numerics = self.options.sm120_moe_numerics
        fault = input_scale_fault(weights) if numerics == "w4a4" else None
        if fault is not None:
            raise ConfigError(
                f"{name}: {fault}",
                "activation scales that are finite and above zero, for W4A4",
                "calibrate the checkpoint's activations again, or pass --sm120-moe-numerics w4a16",
            )
        return numerics

    def _choice_reason(
        self, choice: Choice, weights: Nvfp4MoeWeights, spec: LayerSpec, table: RunnerTable
    ) -> str | None:
        """Why a choice cannot serve the batches for which the table may take it, or None."""
        if choice.runner not in RUNNERS:
            return "there is no such runner"
        runner = RUNNERS[choice.runner]
        if choice.numerics not in runner.numerics:
            return f"it offers {' and '.join(runner.numerics)}"
        if choice.runner == STOCK:  # SGLang's own path, which says for itself what it does not cover
            return "the stock path cannot be emulated" if self.options.sm120_emulate else None
        reason = runner.unavailable_reason(weights.w13_weight.device)
        if reason is not None:
            return reason
        bounds = {row.up_to or self.max_tokens for row in table.rows if choice in row.ranking}
        for tokens in sorted({*_PROBED_TOKENS, *bounds}):
            if tokens <= max(bounds):
                reason = runner.unsupported_reason(weights, spec, choice.numerics, tokens)
                if reason is not None:
                    return f"at {tokens} tokens: {reason}"
        return None

    def _read_profile(self) -> tuple[profiles.Profile, str] | None:
        """The profile that was named, which has to fit; else this machine's own, which is used if it does."""
        named = self.options.sm120_moe_profile
        path = Path(named).expanduser() if named else profiles.default_path()
        if not named and not path.exists():
            return None
        try:
            found = profiles.read(path)
            mismatch = found.machine.mismatch(profiles.current_machine())
            if mismatch is not None:
                raise ConfigError(
                    f"profile {path} was measured elsewhere: {mismatch}",
                    "a profile of this machine and these versions",
                    "run `sglang-sm120 tune` here, or drop --sm120-moe-profile",
                )
        except Sm120Error as error:
            if named:
                raise
            logger.warning("sglang-sm120: not used: %s; the shipped default is", error.found)
            return None
        return found, str(path)
