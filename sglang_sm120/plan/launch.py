"""The exact `sglang serve` command of a plan: every flag and variable with its reason, for every node."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_sm120.plan import kv
from sglang_sm120.plan.fits import Fit
from sglang_sm120.plan.gpus import GIB, Gpu
from sglang_sm120.plan.shapes import ModelShape
from sglang_sm120.plan.splits import Candidate, all_reduce_obstacle

FIRST_NODE = "FIRST-NODE:20000"
INTERFACE = "INTERFACE"
PLACEHOLDER = "MODEL"
"""Stands for the checkpoint where the plan was made from a name of the catalogue."""

# SGLang 0.5.23 takes the target's own checkpoint as the draft's for these; for others it has to be told.
# Its arg_groups/speculative_hook.py; a test compares.
_OWN_DRAFT = frozenset({
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
})  # fmt: skip

# Architectures whose shared expert SGLang 0.5.23 fuses into the routed ones on these GPUs. For GLM-5 and DeepSeek-V3 it
# leaves that by itself where a ModelOpt export names the shared expert; for GLM-4 and other exports it does not.
_FUSES_SHARED = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"})


@dataclass(frozen=True)
class Setting:
    """A flag or an environment variable. value: None for a switch. reason: one line."""

    name: str
    value: str | None
    reason: str


@dataclass(frozen=True)
class Launch:
    """How to start a plan. notes: what else a person should know before starting it."""

    model: str
    flags: tuple[Setting, ...]
    environment: tuple[Setting, ...]
    nodes: int
    notes: tuple[str, ...]

    def argv(self, rank: int = 0) -> list[str]:
        """The words of the command, for the node of this rank."""
        words = ["sglang", "serve", self.model]
        for flag in self.settings(rank):
            words += [flag.name] if flag.value is None else [flag.name, flag.value]
        return words

    def command(self, rank: int = 0) -> str:
        """The command for a shell, a flag a line, for the node of this rank."""
        lines = [f"{variable.name}={shlex.quote(variable.value or '')}" for variable in self.environment]
        lines.append(shlex.join(["sglang", "serve", self.model]))
        for flag in self.settings(rank):
            lines.append("  " + (flag.name if flag.value is None else f"{flag.name} {shlex.quote(flag.value)}"))
        return " \\\n".join(lines)

    def ray(self) -> str | None:
        """SGLang's own Ray form, for several nodes: one command, on the head node. Why without our flags: `notes`."""
        if self.nodes == 1:
            return None
        lines = [f"{variable.name}={shlex.quote(variable.value or '')}" for variable in self.environment]
        lines.append(shlex.join(["sglang", "serve", self.model]))
        flags = [flag for flag in self.flags if "sm120" not in flag.name]
        flags += [Setting("--nnodes", str(self.nodes), ""), Setting("--use-ray", None, "")]
        lines += [
            "  " + (flag.name if flag.value is None else f"{flag.name} {shlex.quote(flag.value)}") for flag in flags
        ]
        return " \\\n".join(lines)

    def settings(self, rank: int = 0) -> tuple[Setting, ...]:
        """Every flag of the command for the node of this rank."""
        if self.nodes == 1:
            return self.flags
        return (
            *self.flags,
            Setting("--nnodes", str(self.nodes), "nodes that serve together; each is started with its own command"),
            Setting("--node-rank", str(rank), f"which of them this is, 0 to {self.nodes - 1}; 0 answers requests"),
            Setting("--dist-init-addr", FIRST_NODE, "where the nodes find the first one; the same for all"),
        )


def launch(model: str, shape: ModelShape, candidate: Candidate, fit: Fit, gpu: Gpu) -> Launch:
    """The command for one split.

    Args:
        model: what `sglang serve` is to be given: a folder, or PLACEHOLDER.
        shape: the model.
        candidate: the split.
        fit: what the accounting says for the concurrency that is to be served.
        gpu: the kind of GPU.
    """
    return Launch(
        model=model,
        flags=(*_package(gpu), *_parallel(candidate), *_model(model, shape, fit), *_memory(shape, candidate, fit)),
        environment=tuple(_environment(candidate)),
        nodes=candidate.split.nodes,
        notes=tuple(_notes(model, shape, candidate, gpu)),
    )


def _package(gpu: Gpu) -> Iterator[Setting]:
    yield Setting("--enable-sm120-opts", None, "turns this package on; without it the server is stock SGLang")
    if not gpu.is_sm120:
        yield Setting("--sm120-emulate", None, f"{gpu.title} is no SM120 GPU, which the package refuses without this")


def _parallel(candidate: Candidate) -> Iterator[Setting]:
    split = candidate.split
    over = f"over {split.tp} GPUs" if split.tp > 1 else "on one GPU"
    yield Setting("--tp-size", str(split.tp), f"each layer's weights {over}")
    if split.ep > 1:
        whole = " (all of TP, as SGLang's flashinfer_cutlass asks)" if split.ep == split.tp else ""
        yield Setting("--ep-size", str(split.ep), f"whole experts on {split.ep} GPUs instead of a part of each{whole}")
    if split.dp_attention > 1:
        yield Setting("--attn-dp-size", str(split.dp_attention),
            f"attention of {split.dp_attention} groups, each with its requests; was --enable-dp-attention")  # fmt: skip
    if split.pp > 1:
        yield Setting("--pp-size", str(split.pp), f"layers over {split.pp} stages, which hand on a hidden state")
    if candidate.replicas > 1:
        yield Setting("--dp-size", str(candidate.replicas),
            f"{candidate.replicas} copies of the model, which share nothing but the port")  # fmt: skip


def _model(model: str, shape: ModelShape, fit: Fit) -> Iterator[Setting]:
    if shape.quantization.method == "modelopt_fp4" and shape.moe is not None:
        yield Setting("--quantization", "modelopt_fp4",
            "left out, stock SGLang prepares NVFP4 experts for another kernel than it calls on these GPUs")  # fmt: skip
    stored = shape.quantization
    if shape.moe is not None and stored.method == "modelopt_mixed" and stored.experts == "nvfp4":
        yield Setting("--moe-runner-backend", "flashinfer_cutlass",
            "left out, stock SGLang prepares NVFP4 experts for another kernel than it calls on these GPUs")  # fmt: skip
    shared = shape.moe is not None and shape.moe.shared_intermediate_size > 0
    if shape.architecture in _FUSES_SHARED and shared and stored.experts == "nvfp4" != stored.shared_expert:
        yield Setting("--disable-shared-experts-fusion", None,
            "the shared expert is not NVFP4; fused into the routed ones, loading fails (GLM-5.2 NVFP4)")  # fmt: skip
    yield Setting("--kv-cache-dtype", fit.serving.kv_dtype, "what the KV cache was counted with")
    yield Setting("--context-length", str(fit.serving.context), "longest request, prompt and answer")
    if fit.serving.mtp:
        yield Setting(
            "--speculative-algorithm", "EAGLE", "drafts with the model's MTP head; steps are SGLang's default"
        )
        if shape.architecture not in _OWN_DRAFT:
            yield Setting("--speculative-draft-model-path", model, "the MTP head is in the model's own checkpoint")


def _memory(shape: ModelShape, candidate: Candidate, fit: Fit) -> Iterator[Setting]:
    groups = candidate.groups // candidate.replicas
    outside = f"outside are the {fit.outside_bytes / GIB:.1f} GiB of all else"
    reason = f"weights and KV cache; {outside}. {_stock_fraction(fit)}"
    yield Setting("--mem-fraction-static", f"{fit.mem_fraction:.3f}", reason)
    if shape.attention.linear is not None:
        yield Setting("--max-mamba-cache-size", str(kv.STATE_SLOTS_A_REQUEST * fit.running_flag),
            f"states of linear attention, {kv.STATE_SLOTS_A_REQUEST} a request; more keep more prefixes for reuse; "
            "left out, SGLang gives them 47 % of what is left for the KV cache")  # fmt: skip
    shared = f", which SGLang divides by attention DP {groups}" if groups > 1 else ""
    yield Setting("--chunked-prefill-size", str(fit.chunk_flag), f"tokens of a prefill step{shared}")
    yield Setting("--cuda-graph-max-bs-decode", str(fit.graph_max_bs),
        "decode batches up to this are captured; larger ones run without a graph")  # fmt: skip
    each = " of each replica" if candidate.replicas > 1 else f" over {groups} attention groups" if groups > 1 else ""
    yield Setting("--max-running-requests", str(fit.running_flag), f"requests at once{each}; more wait")


def _stock_fraction(fit: Fit) -> str:
    held = f"{fit.default_kv_tokens:,} tokens of KV cache" if fit.default_kv_tokens else "no KV cache"
    return f"SGLang by itself takes {fit.default_fraction:.3f}: {held}, not {fit.kv_tokens:,}"


def _environment(candidate: Candidate) -> Iterator[Setting]:
    if candidate.split.nodes > 1:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield Setting(name, INTERFACE, "the network interface that the nodes reach each other by")


def _notes(model: str, shape: ModelShape, candidate: Candidate, gpu: Gpu) -> Iterator[str]:
    split = candidate.split
    if model == PLACEHOLDER:
        yield f"{PLACEHOLDER} stands for the checkpoint: its folder, or its name on the hub."
    obstacle = all_reduce_obstacle(candidate, gpu)
    if split.tp > 1 and obstacle is None:
        yield (
            "Sums over the ranks of one host are this package's where they are small; from which size on they are "
            f"NCCL's is a guess until `sglang-sm120 tune --comm --world-size {split.tp}` has measured this host."
        )
    elif split.tp > 1:
        yield f"This package's all-reduce is not used: {obstacle}."
    if gpu.p2p is None and split.gpus > 1:
        yield f"Whether {gpu.title} has P2P is not known here: `sglang-sm120 bench p2p` says."
    if split.gpus > 1 and gpu.p2p and gpu.is_sm120:
        yield (
            "Between PCIe host bridges NCCL goes through host memory by itself. NCCL_P2P_LEVEL=SYS makes it use P2P; "
            "set it only where `sglang-sm120 bench p2p` finds every pair in order: with a broken bus NCCL hangs."
        )
    if split.gpus > 1:
        yield "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True must not be set: memory that GPUs share breaks with it."
    if shape.moe is not None and shape.quantization.experts == "nvfp4":
        ep = f" --ep-size {split.ep}" if split.ep > 1 else ""
        yield (
            "Which MoE runner serves which batch is a guess until "
            f"`sglang-sm120 tune --model {model} --tp-size {split.tp}{ep}` has measured this GPU."
        )
    elif shape.moe is not None:
        yield "The experts are not NVFP4: SGLang's own MoE kernels serve them, as docs/runners.md says."
    if split.nodes > 1:
        yield f"{FIRST_NODE} stands for the first node's address and a free port, {INTERFACE} for a network interface."
        yield (
            "Ray: one command, on the head node of a Ray cluster. SGLang 0.5.23 loads no plugins in its Ray actors, so "
            "nothing of this package runs there, and its flags are left out."
        )
