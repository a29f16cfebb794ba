"""All-reduce between the GPUs of one host over PCIe or NVLink, alone or with residual add and RMSNorm behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_sm120.errors import ContractError, Sm120Error, UnsupportedError
from sglang_sm120.kernels.communication.agreement import Exchange
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config, kernel, reference
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import ALGORITHMS, DEFAULT_RANGES, Range, Shape, Space
from sglang_sm120.kernels.communication.window import Window, connect

__all__ = [
    "ALGORITHMS",
    "SOURCE",
    "Communicator",
    "PeerLostError",
    "Range",
    "reference",
    "unsupported_reason",
    "workspace_bytes",
]

SOURCE = kernel.SOURCE

START_LIMIT_S = 10.0
"""How long a kernel waits for a peer before it gives up. Before serving ranks are close together."""


class PeerLostError(Sm120Error, RuntimeError):
    """A kernel gave up waiting for a peer; this process' CUDA context is lost with it."""


def unsupported_reason(*, world_size: int, dtype: torch.dtype, hidden_size: int | None = None) -> str | None:
    """One sentence on why the kernels do not cover this, or None. hidden_size: with a norm behind."""
    if world_size not in config.WORLD_SIZES:
        return f"{world_size} ranks are not covered: 2, 4 and 8 are"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not covered: bfloat16 and float16 are"
    if hidden_size is not None and (hidden_size % config.VECTOR or not 0 < hidden_size <= config.MAX_HIDDEN):
        return f"hidden size {hidden_size} is not covered: multiples of {config.VECTOR} up to {config.MAX_HIDDEN} are"
    return None


def workspace_bytes(ranges: Sequence[Range], *, world_size: int, hidden_size: int) -> int:
    """Device bytes of a rank's window that serves these ranges (plain and with a norm, together)."""
    return config.window_bytes(config.space_for(ranges, world_size, hidden_size))


class Communicator:
    """One rank's end of a group that reduces through windows in each other's memory.

    One communicator is one order of calls: its calls run on one stream, or on streams that wait for each other, and in
    the same order, with the same shapes, on every rank. CUDA graphs may be captured and replayed in any number, mixed
    with eager calls, as long as all ranks do the same.
    """

    def __init__(
        self,
        window: Window,
        space: Space,
        ranges: Sequence[Range],
        *,
        norm_ranges: Sequence[Range] | None = None,
        limit_s: float = START_LIMIT_S,
    ) -> None:
        """window: at least `config.window_bytes(space)`, zeroed. ranges: which algorithm serves which size."""
        self.window, self._space, self.ranges = window, space, tuple(ranges)
        self.norm_ranges = self.ranges if norm_ranges is None else tuple(norm_ranges)
        self.set_time_limit(limit_s)
        kernel.module(window)  # compiles and loads now, not inside a capture

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        exchange: Exchange,
        *,
        hidden_size: int,
        device: torch.device,
        ranges: Sequence[Range] | None = None,
        norm_ranges: Sequence[Range] | None = None,
        limit_s: float = START_LIMIT_S,
    ) -> Communicator:
        """Share memory with the other ranks and make a communicator. A collective: all ranks succeed, or all raise.

        Args:
            rank, world_size: of this process in the group; 2, 4 or 8 ranks on one host.
            exchange: a collective over bytes, such as torch.distributed.all_gather_object on a gloo group.
            hidden_size: elements of a row.
            device: this rank's GPU, the current device.
            ranges: which algorithm serves which message size, equal on all ranks; None: a shipped default.
            norm_ranges: the same for `all_reduce_rmsnorm`; None: as `ranges`.
            limit_s: how long a kernel waits for a peer.

        Raises:
            UnsupportedError: what is not covered, or GPUs that cannot share memory (see `window.connect`).

        Allocates `workspace_bytes(...)` outside torch's allocator, twice the largest message times one plus the number
        of ranks at most. Never inside a capture.
        """
        reason = unsupported_reason(world_size=world_size, dtype=torch.bfloat16, hidden_size=hidden_size)
        if reason is not None:
            raise UnsupportedError(reason, "what the kernels cover", "leave the reduction to NCCL")
        ranges = DEFAULT_RANGES[world_size] if ranges is None else ranges
        norm_ranges = ranges if norm_ranges is None else norm_ranges
        space = config.space_for([*ranges, *norm_ranges], world_size, hidden_size)
        window = connect(rank, exchange, config.window_bytes(space), device)
        return cls(window, space, ranges, norm_ranges=norm_ranges, limit_s=limit_s)

    def algorithm(self, shape: Sequence[int], *, norm: bool = False) -> str | None:
        """What serves a tensor of this shape, by its size alone and so the same on every rank; None: nothing does."""
        elements = torch.Size(shape).numel()
        if elements == 0 or elements % config.VECTOR:
            return None
        work = Shape(elements // shape[-1], shape[-1], elements) if norm else config.flat(elements)
        chosen = config.choose(self.norm_ranges if norm else self.ranges, 2 * elements)
        return chosen if chosen is not None and self.window_holds(chosen, work) else None

    def all_reduce(self, x: Tensor, *, out: Tensor | None = None, algorithm: str | None = None) -> Tensor:
        """Sum a tensor over all ranks.

            out = x of rank 0 + x of rank 1 + ... + x of rank W - 1

        Args:
            x: bfloat16 or float16 [...], contiguous, aligned to 16 bytes, a multiple of 8 elements; the same shape on
                every rank.
            out: like x; may be x. None: a new tensor.
            algorithm: one of ALGORITHMS; None: by the size.

        Returns:
            out.

        Raises:
            ContractError: tensors that contradict this. UnsupportedError: larger than the windows were made for.
            PeerLostError, of a later call or `check`: a peer did not come within the time limit.

        Numerics: fp32 in the order of the ranks, rounded once. The same bits on every rank, by every algorithm.

        Source: kernel.cu, reference.py. Captured in a CUDA graph: yes. No host sync.
        """
        out = torch.empty_like(x) if out is None else out
        self._check(x, out)
        if x.numel() == 0:
            return out
        work = config.flat(x.numel())
        kernel.run(self.window, self._space, self._chosen(algorithm, work, self.ranges), work, x, out)
        return out

    def all_reduce_rmsnorm(
        self,
        x: Tensor,
        residual: Tensor,
        gamma: Tensor,
        eps: float,
        *,
        gamma_offset: float = 0.0,
        out: Tensor | None = None,
        residual_out: Tensor | None = None,
        algorithm: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sum over all ranks, add to the residual, and normalise, in one kernel.

            h            = residual + (x of rank 0 + ... + x of rank W - 1)
            residual_out = h
            out          = h / sqrt(mean(h^2) + eps) * (gamma + gamma_offset)

        Args:
            x: bfloat16 or float16 [T, H], contiguous, aligned to 16 bytes; the same shape on every rank.
            residual: like x, with the same values on every rank.
            gamma: [H] of x's dtype.
            eps: added to the mean square.
            gamma_offset: 1 for Gemma's norm, whose weight is gamma + 1.
            out: like x; may be x. residual_out: like x; may be residual. None: new tensors.
            algorithm: one of ALGORITHMS; None: by the size.

        Returns:
            (out, residual_out).

        Raises: as `all_reduce`.

        Numerics: the sum as `all_reduce` gives it, rounded; then fp32, the norm of h before it is rounded: what an
            all-reduce and SGLang's fused_add_rmsnorm give. The same bits on every rank, by every algorithm.

        Source: kernel.cu, reference.py. Captured in a CUDA graph: yes. No host sync.
        """
        out = torch.empty_like(x) if out is None else out
        residual_out = torch.empty_like(residual) if residual_out is None else residual_out
        self._check(x, out, residual, residual_out)
        hidden = x.shape[-1]
        reason = unsupported_reason(world_size=self.window.world_size, dtype=x.dtype, hidden_size=hidden)
        if x.dim() != 2 or gamma.shape != (hidden,) or gamma.dtype != x.dtype or not gamma.is_contiguous() or reason:
            raise ContractError(
                reason or f"x {list(x.shape)} of {x.dtype} with gamma {list(gamma.shape)} of {gamma.dtype}",
                "x [T, H] and a contiguous gamma [H] of one dtype",
                "flatten x to rows, and pass the norm's weight in the model's dtype",
            )
        if x.numel() == 0:
            return out, residual_out
        work = Shape(x.shape[0], hidden, x.numel())
        norm = residual, residual_out, gamma, float(eps), float(gamma_offset)
        kernel.run(self.window, self._space, self._chosen(algorithm, work, self.norm_ranges), work, x, out, norm)
        return out, residual_out

    def set_time_limit(self, seconds: float) -> None:
        """How long a kernel waits for a peer before it gives up and ends the CUDA context; also in captured graphs."""
        self.window.status[kernel.LIMIT_MS] = min(int(seconds * 1000), 2**32 - 1)

    def check(self) -> None:
        """Raise PeerLostError if a kernel has given up. Reads host memory only: cheap, and right from any thread."""
        status = self.window.status
        if len(status) and status[kernel.FAULT]:
            raise PeerLostError(
                f"rank {self.window.rank} waited {status[kernel.LIMIT_MS] / 1000:g} s for a signal of rank "
                f"{status[kernel.PEER]} (call {status[kernel.EPOCH]}, block {status[kernel.BLOCK]}, phase "
                f"{status[kernel.PHASE]})",
                "a rank that is alive and makes the same calls, and peer-to-peer memory that works",
                "look at that rank's log; if it waits too, `sglang-sm120 bench p2p` tests the bus (IOMMU, ACS)",
            )

    def close(self) -> None:
        """Unmap and free the windows; a collective on GPUs. No call may follow."""
        self.window.close()

    def _chosen(self, algorithm: str | None, work: Shape, ranges: Sequence[Range]) -> str:
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ContractError(f"algorithm {algorithm!r}", f"one of {', '.join(ALGORITHMS)}", "correct the name")
        chosen = algorithm or config.choose(ranges, 2 * work.elements)
        if chosen is None or not self.window_holds(chosen, work):
            raise UnsupportedError(
                f"a message of {2 * work.elements} bytes" + (f" by {chosen}" if chosen else ""),
                "one that the windows were made for: "
                + ", ".join(f"{entry.algorithm} up to {entry.max_bytes}" for entry in ranges),
                "ask `algorithm(shape)` before, and leave larger ones to NCCL; or connect with larger ranges",
            )
        return chosen

    def window_holds(self, algorithm: str, work: Shape) -> bool:
        """Whether the windows are large enough for this call by this algorithm; the same on every rank."""
        return self._space.holds(config.space_of(algorithm, work, self.window.world_size))

    def _check(self, x: Tensor, *others: Tensor) -> None:
        self.check()
        for tensor in (x, *others):
            same = tensor.shape == x.shape and tensor.dtype == x.dtype and tensor.device == x.device
            if not same or not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ContractError(
                    f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}, at "
                    f"{tensor.data_ptr() % 16} bytes from a multiple of 16, beside x {list(x.shape)} of {x.dtype}",
                    "contiguous tensors like x, aligned to 16 bytes",
                    "call contiguous(), or leave it to NCCL",
                )
        if x.device != self.window.device or x.dtype not in kernel.DTYPES or x.numel() % config.VECTOR:
            raise ContractError(
                f"x {list(x.shape)} of {x.dtype} on {x.device}",
                f"bfloat16 or float16 on {self.window.device}, a multiple of {config.VECTOR} elements",
                "leave it to NCCL",
            )
