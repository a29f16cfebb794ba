"""The table of options, as data: flags, environment variables, `Engine` keywords and `docs/flags.md` come from it.

Standard library only, as `options.py`, which checks the values and merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One row: `kind` is bool or str; the flag, variable and keyword names derive from `name`."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    metavar: str = "FILE"

    @property
    def values(self) -> tuple[str, ...]:
        """What may follow the flag: the choices, what stands for a free value, or nothing for a switch."""
        return () if self.kind is bool else self.choices or (self.metavar,)

    @property
    def default_text(self) -> str:
        """For people: "off", "none" or the value."""
        return "off" if self.kind is bool else self.default or "none"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "SGLANG_SM120_ENABLE" if self.name == "enable_sm120_opts" else "SGLANG_" + self.name.upper()


OPTIONS: tuple[Option, ...] = (
    Option(
        "enable_sm120_opts",
        bool,
        False,
        "Turn sglang-sm120 on. Without it the plugin changes nothing. With it, anything that was asked for and cannot "
        "be served stops the server with the reason.",
    ),
    Option(
        "sm120_moe_backend",
        str,
        "auto",
        "Which runner serves NVFP4 mixture-of-experts layers. auto: for each batch the one that this machine's profile "
        "(`sglang-sm120 tune`) has as the fastest; without a profile our kernels up to 64 tokens and the stock path "
        "above. native: our kernels. flashinfer_cutlass: the stock path, with its weights checked. b12x: the kernels "
        "that FlashInfer brings under this name. reference: plain torch with exact NVFP4 semantics, slow, to check the "
        "others against.",
        choices=("auto", "native", "flashinfer_cutlass", "b12x", "reference"),
    ),
    Option(
        "sm120_moe_numerics",
        str,
        "auto",
        "Activations of NVFP4 MoE layers. w4a4: quantised to NVFP4 as the checkpoint was calibrated (what the stock "
        "path does). w4a16: kept in the model's dtype, by every runner. auto: each runner its own: native w4a16, the "
        "stock path w4a4, and reference w4a4 where the checkpoint has input scales.",
        choices=("auto", "w4a4", "w4a16"),
    ),
    Option(
        "sm120_moe_profile",
        str,
        "",
        "The profile to choose MoE runners by, a file that `sglang-sm120 tune` wrote on this machine. Left out: the "
        "file that it writes by default, if that is there and fits.",
    ),
    Option(
        "sm120_all_reduce",
        str,
        "auto",
        "Who sums over the tensor-parallel ranks of one host. auto: our kernels, which also add the residual and apply "
        "RMSNorm, for sizes at which they should beat NCCL; SGLang's own path for all else. off: SGLang untouched. "
        "one-shot, two-shot: our kernels of that family for every message that fits, or the server stops with the "
        "reason. stock: FlashInfer's pcie_ipc, which SGLang has and leaves off.",
        choices=("auto", "off", "one-shot", "two-shot", "stock"),
    ),
    Option(
        "sm120_all_reduce_profile",
        str,
        "",
        "The profile to choose all-reduces by, a file that `sglang-sm120 tune --comm` wrote on this machine for this "
        "model's hidden size and dtype and this number of ranks. Left out: the file that it writes by default, if that "
        "is there and fits.",
    ),
    Option(
        "sm120_l2",
        str,
        "off",
        "Dense weights in L2, inside decode graphs. prefetch: what the next phase reads is fetched while attention or "
        "an all-reduce leaves the bus idle. persist: as many of the first layers' projections as fit are kept in L2 "
        "from one step to the next by access policy windows. both. Neither changes a result. Off by default: measure "
        "with `sglang-sm120 bench l2` whether this machine gains.",
        choices=("off", "persist", "prefetch", "both"),
    ),
    Option(
        "sm120_l2_prefetch_mb",
        str,
        "",
        "How much each prefetch may fetch, in MB (2^20 bytes): one number, or three for under attention, under the "
        "all-reduce behind it, and under the one behind the FFN; 0 leaves one out. Left out: a quarter of L2 for each "
        "of the last two.",
        metavar="MB[,MB,MB]",
    ),
    Option(
        "sm120_l2_persist_mb",
        str,
        "",
        "How much of L2 is set aside for what persists, in MB (2^20 bytes). Left out: all that the GPU allows.",
        metavar="MB",
    ),
    Option(
        "sm120_verify",
        str,
        "auto",
        "Before the server is ready, run every MoE runner that it may use on the real weights of the first, a middle "
        "and the last layer, and compare with reference. auto: a runner that is wrong is not used, and one that was "
        "asked for by name stops the server. strict: any that is wrong stops it. off: no check.",
        choices=("auto", "off", "strict"),
    ),
    Option(
        "sm120_emulate",
        bool,
        False,
        "Run without an SM120 GPU: on another CUDA GPU, or on the CPU. For tests and demonstrations; slow.",
    ),
)
