"""The ways to spread a model over GPUs that SGLang 0.5.23 has, and what rules one out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_sm120.plan.gpus import Gpu
from sglang_sm120.plan.memory import Split, problems
from sglang_sm120.plan.shapes import ModelShape


@dataclass(frozen=True)
class Candidate:
    """A split, and how many copies of the whole model serve side by side (SGLang's --dp-size)."""

    split: Split
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """GPUs over all nodes."""
        return self.split.gpus * self.replicas

    @property
    def groups(self) -> int:
        """Parts that the requests are spread over, each with a KV cache of its own."""
        return self.replicas * self.split.dp_attention

    @property
    def label(self) -> str:
        """For people: "TP8", "TP8 EP8", "TP8, attention DP2", "PP2 x TP4", "2 replicas of TP4"."""
        split = self.split
        text = f"TP{split.tp}" + (f" EP{split.ep}" if split.ep > 1 else "")
        text += f", attention DP{split.dp_attention}" if split.dp_attention > 1 else ""
        text = f"PP{split.pp} x {text}" if split.pp > 1 else text
        text = f"{self.replicas} replicas of {text}" if self.replicas > 1 else text
        return text + (f" on {split.nodes} nodes" if split.nodes > 1 else "")

    @property
    def sums_cross_nodes(self) -> bool:
        """Whether a tensor-parallel group has GPUs of several nodes."""
        return self.split.nodes > self.split.pp


def candidates(gpus: int, nodes: int = 1) -> list[Candidate]:
    """Every split of all GPUs, those that people ask for first.

    Args:
        gpus: of one node.
        nodes: machines; pipeline stages are laid along them where there are as many.
    """
    return sorted(dict.fromkeys(_all(gpus, nodes)), key=_order)


def obstacles(shape: ModelShape, candidate: Candidate, mtp: bool = False) -> list[str]:
    """Why a split cannot be served, whatever the memory; empty if it can.

    Args:
        shape: the model.
        candidate: the split.
        mtp: whether the MTP head drafts.
    """
    split = candidate.split
    found = list(problems(shape, split))
    if 1 < split.ep < split.tp and _is_modelopt_nvfp4(shape):
        found.append(f"SGLang serves NVFP4 experts on these GPUs with EP 1 or EP {split.tp} (all of TP) only")
    if mtp and split.pp > 1:
        found.append("SGLang 0.5.23 does not draft with an MTP head under pipeline parallelism")
    if candidate.replicas > 1 and split.nodes > 1:
        found.append("SGLang 0.5.23 has no data-parallel replicas over several nodes")
    return list(dict.fromkeys(found))


def all_reduce_obstacle(candidate: Candidate, gpu: Gpu) -> str | None:
    """Why this package's all-reduce leaves the sums to SGLang; None where it may serve them (docs/all-reduce.md)."""
    split = candidate.split
    if split.tp == 1:
        return "one rank a stage: there is nothing to sum"
    if split.nodes > 1:
        return "several nodes: it maps memory between the GPUs of one host, and is not for --nnodes above 1"
    if split.dp_attention > 1:
        return "attention data parallelism sums over parts of the ranks"
    if split.tp not in (2, 4, 8):
        return f"its kernels are for 2, 4 and 8 ranks, not {split.tp}"
    if gpu.p2p is False:
        return f"the stock driver has no P2P on {gpu.title}"
    return None


def _all(gpus: int, nodes: int) -> Iterator[Candidate]:
    total = gpus * nodes
    for pp in _divisors(total):
        if pp % nodes and nodes % pp:
            continue  # SGLang gives each node whole stages, or each stage whole nodes
        tp = total // pp
        yield Candidate(Split(tp=tp, pp=pp, nodes=nodes))
        if pp > 1:
            continue
        for width in _divisors(tp)[1:]:
            yield Candidate(Split(tp=tp, ep=width, pp=pp, nodes=nodes))
            yield Candidate(Split(tp=tp, dp_attention=width, pp=pp, nodes=nodes))
            yield Candidate(Split(tp=tp, ep=tp, dp_attention=width, pp=pp, nodes=nodes))
    if nodes == 1:
        for replicas in _divisors(total)[1:]:
            yield Candidate(Split(tp=total // replicas), replicas)


def _is_modelopt_nvfp4(shape: ModelShape) -> bool:
    """Whether SGLang's MoE runner is flashinfer_cutlass for the server, whose rule on EP it is."""
    return (
        shape.moe is not None
        and shape.quantization.experts == "nvfp4"
        and shape.quantization.method.startswith("modelopt")
    )


def _order(candidate: Candidate) -> tuple[bool, int, int, int, int]:
    split = candidate.split
    return candidate.sums_cross_nodes, split.pp, candidate.replicas, split.dp_attention, split.ep


def _divisors(number: int) -> list[int]:
    """Ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
