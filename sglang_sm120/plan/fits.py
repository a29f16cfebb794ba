"""Whether one split holds a number of requests, by the accounting of `memory`, with the settings it takes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_sm120.plan import kv
from sglang_sm120.plan.gpus import GIB, Gpu
from sglang_sm120.plan.memory import (
    Component,
    Serving,
    default_mem_fraction,
    fixed,
    kv_bytes_per_token,
    kv_tokens,
    suggested_mem_fraction,
)
from sglang_sm120.plan.shapes import ModelShape
from sglang_sm120.plan.splits import Candidate, all_reduce_obstacle

LEAST_CHUNK = 2048


@dataclass(frozen=True)
class Request:
    """What is to be served. concurrency: requests at once, ascending. kv_dtype: resolved, never "auto"."""

    context: int
    concurrency: tuple[int, ...]
    kv_dtype: str
    mtp: bool
    gpu: Gpu


@dataclass(frozen=True)
class Fit:
    """One split at one concurrency. Bytes and tokens are of one GPU, the fullest.

    components: all that a GPU holds but the KV cache. needed_tokens: of KV cache, for every request at full context.
    kv_tokens: what SGLang allocates with mem_fraction. all_kv_tokens: over the groups that have a cache of their own.
    default_fraction, default_kv_tokens: of SGLang by itself. most_requests: at full context.
    why: one sentence where it does not fit.
    chunk_flag, running_flag: as the command takes them, over attention groups.
    """

    concurrency: int
    serving: Serving
    components: tuple[Component, ...]
    gpu_bytes: int
    kv_bytes_per_token: int
    needed_tokens: int
    kv_tokens: int
    all_kv_tokens: int
    most_requests: int
    mem_fraction: float
    default_fraction: float
    default_kv_tokens: int
    chunk_flag: int
    running_flag: int
    graph_max_bs: int
    why: str

    @property
    def fits(self) -> bool:
        """Whether every request has room for its whole context."""
        return self.kv_tokens >= self.needed_tokens

    @property
    def holds_one(self) -> bool:
        """Whether one request at full context can be served."""
        return self.most_requests > 0

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return sum(component.bytes for component in self.components)

    @property
    def weight_bytes(self) -> int:
        """Weights, with the MTP head."""
        return sum(component.bytes for component in self.components if component.kind == "weights")

    @property
    def outside_bytes(self) -> int:
        """What is neither weights nor cache."""
        return sum(part.bytes for part in self.components if part.kind not in ("weights", "kv"))

    @property
    def tokens_each(self) -> int:
        """Tokens that a request of the fullest group may have on average, if all run at once."""
        return min(self.kv_tokens // self.serving.concurrency, self.serving.context)


def fit(shape: ModelShape, candidate: Candidate, request: Request, concurrency: int) -> Fit:
    """The first of SGLang's chunk sizes, from its default down, with which the split holds the requests.

    Where none does: the first that holds one request at full context, else the smallest.
    """
    tried = []
    for chunk in _chunks(request.gpu):
        tried.append(_fit(shape, candidate, request, concurrency, chunk))
        if tried[-1].fits:
            return tried[-1]
    return next((one for one in tried if one.holds_one), tried[-1])


def graph_batch_sizes(max_bs: int, mtp: bool) -> tuple[int, ...]:
    """The decode batches that SGLang 0.5.23 captures up to max_bs (arg_groups/cuda_graph_hook.py; a test compares)."""
    if mtp:
        steps = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, max_bs + 1, 16)]
    else:
        steps = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_bs + 1, 32)]
    return tuple(sorted({size for size in steps if size <= max_bs} | {max_bs}))


def default_chunk(gpu: Gpu) -> int:
    """SGLang 0.5.23's --chunked-prefill-size, by what nvidia-smi shows (arg_groups/memory_hook.py; a test compares)."""
    return _by_memory(gpu, (2048, 4096, 4096, 8192, 8192, 16384))


def default_graph_max_bs(gpu: Gpu, tp: int) -> int:
    """Likewise, the largest decode batch that is captured."""
    return _by_memory(gpu, (8, 48, 32, 256, 256, 512) if tp < 4 else (8, 160, 160, 512, 512, 512))


def _by_memory(gpu: Gpu, values: tuple[int, ...]) -> int:
    return values[bisect.bisect_right((20 * GIB, 35 * GIB, 60 * GIB, 90 * GIB, 160 * GIB), gpu.shown_bytes)]


def _chunks(gpu: Gpu) -> Iterator[int]:
    chunk = default_chunk(gpu)
    while chunk >= LEAST_CHUNK:
        yield chunk
        chunk //= 2


def _fit(shape: ModelShape, candidate: Candidate, request: Request, concurrency: int, chunk: int) -> Fit:
    split, gpu = candidate.split, request.gpu
    groups = candidate.groups
    here = -(-concurrency // groups)  # requests of one group, which is what a GPU holds the KV cache of
    graph_max_bs = min(-(-here // split.pp), default_graph_max_bs(gpu, split.tp))
    serving = Serving(
        context=request.context,
        concurrency=here,
        chunked_prefill=chunk // split.dp_attention,  # SGLang divides its flag so
        kv_dtype=request.kv_dtype,
        mtp=request.mtp,
        graph_batch_sizes=graph_batch_sizes(graph_max_bs, request.mtp),
        our_runners=gpu.is_sm120 and shape.moe is not None and shape.quantization.experts == "nvfp4",
        all_reduce=all_reduce_obstacle(candidate, gpu) is None,
    )
    components = tuple(fixed(shape, split, serving))
    fraction = suggested_mem_fraction(shape, split, serving, gpu.cuda_bytes)
    default = default_mem_fraction(shape, split, serving, gpu.shown_bytes)
    tokens = kv_tokens(shape, split, serving, gpu.cuda_bytes)
    per_token = kv_bytes_per_token(shape, split, request.kv_dtype, mtp=request.mtp)
    page = kv.page_size(shape)
    a_request = -(-request.context // page) * page  # a page is of one request
    needed = here * a_request
    return Fit(
        concurrency=concurrency,
        serving=serving,
        components=components,
        gpu_bytes=gpu.cuda_bytes,
        kv_bytes_per_token=per_token,
        needed_tokens=needed,
        kv_tokens=tokens,
        all_kv_tokens=tokens * groups,
        most_requests=tokens // a_request * groups,
        mem_fraction=fraction,
        default_fraction=default,
        default_kv_tokens=kv_tokens(shape, split, serving, gpu.cuda_bytes, default),
        chunk_flag=chunk,
        running_flag=here * split.dp_attention,
        graph_max_bs=graph_max_bs,
        why=_why(components, gpu, per_token, needed, tokens, a_request),
    )


def _why(components: tuple[Component, ...], gpu: Gpu, per_token: int, needed: int, tokens: int, context: int) -> str:
    """One sentence on why it does not fit; empty where it does."""
    if tokens >= needed:
        return ""
    have = gpu.cuda_bytes / GIB
    weights = sum(part.bytes for part in components if part.kind == "weights")
    if weights >= gpu.cuda_bytes:
        return f"weights alone are {weights / GIB:.1f} GiB a GPU, {have:.1f} there are"
    held = sum(part.bytes for part in components)
    if held >= gpu.cuda_bytes:
        of_it = f"of which weights {weights / GIB:.1f}"
        return f"{held / GIB:.1f} GiB a GPU without any KV cache, {of_it}; {have:.1f} there are"
    one = context * per_token / GIB
    if tokens < context:
        return f"one request's KV cache is {one:.1f} GiB, {tokens * per_token / GIB:.1f} are left for it"
    return f"{needed:,} tokens of KV cache a GPU are asked for, {tokens:,} fit"
