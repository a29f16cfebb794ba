"""The expert schedule: which slots each expert's rows come from, in blocks of a fixed number of rows.

A slot is one (token, choice) pair, s = t * k + j. Grouped GEMMs read rows in the order of `sorted_slots`, one expert a
block of rows; the order of the blocks' tiles is `order`. Everything is on the device: nothing is read back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.expert_schedule import config, kernel, reference

__all__ = [
    "SOURCE",
    "ExpertSchedule",
    "Implementation",
    "Order",
    "empty_schedule",
    "expert_schedule",
    "max_blocks",
    "unsupported_reason",
    "workspace_bytes",
]

SOURCE = kernel.SOURCE

Order = Literal["column_major", "row_major"]
Implementation = Literal["auto", "reference", "kernel"]

_ORDERS = ("column_major", "row_major")
_EXACT = ("expert_first_block", "expert_rows", "num_blocks")  # the other tensors may be longer
_INFO_ALIGNMENT = 16  # bytes: a block's four numbers are one store and one load


@dataclass(frozen=True, eq=False)
class ExpertSchedule:
    """E experts on this rank; all tensors int32 and contiguous. Only num_blocks[0] blocks are there; see max_blocks.

    sorted_slots: int32 [capacity], capacity >= max_blocks * block_rows; expert e's slots in ascending order from
        expert_first_block[e] * block_rows on; -1 in all other places, to the end of the tensor.
    block_expert: int32 [max_blocks or more]; the expert of each block. Not written from num_blocks on.
    expert_first_block: int32 [E]; for an expert without rows, where its first block would be.
    expert_rows: int32 [E]; slots of each expert, without padding.
    num_blocks: int32 [1].
    block_info: int32 [max_blocks or more, 4]; for each block its expert, and the first block, the number of blocks and
        the rows of that expert. Starts at a multiple of 16 bytes. Not written from num_blocks on.
    block_rows: rows of a block.
    order: how tiles are walked by whoever reads this: "column_major", all row blocks of an expert's weight column
        before its next column (each weight byte is fetched once), or "row_major".
    """

    sorted_slots: Tensor
    block_expert: Tensor
    expert_first_block: Tensor
    expert_rows: Tensor
    num_blocks: Tensor
    block_info: Tensor
    block_rows: int
    order: Order = "column_major"


def max_blocks(num_slots: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing of num_slots slots can need: the maximum of sum over e of ceil(rows_e / b).

    A first slot opens a block in every expert that has one; after that a block is `block_rows` more slots.
    """
    opened = min(num_slots, num_experts)
    return opened + (num_slots - opened) // block_rows


def unsupported_reason(num_slots: int, num_experts: int, block_rows: int) -> str | None:
    """One sentence on why the kernel does not cover these sizes (the reference does, below 2**31 rows), or None."""
    if num_experts > config.MAX_EXPERTS:
        return (
            f"{num_experts} experts on this rank: the kernel has one thread an expert and its counters in shared "
            f"memory ({config.MAX_SHARED_BYTES} bytes a block), which ends at {config.MAX_EXPERTS}"
        )
    rows = max(1, max_blocks(num_slots, num_experts, block_rows)) * block_rows
    if rows > config.MAX_ROWS:
        return f"{num_slots} slots may need {rows} rows with padding: the kernel indexes {config.MAX_ROWS} at most"
    return None


def workspace_bytes(*, num_slots: int, num_experts: int, block_rows: int) -> int:
    """Bytes of the ExpertSchedule that `empty_schedule` makes; the kernel needs no other memory on the device."""
    return 4 * sum(map(math.prod, _shapes(num_slots, num_experts, block_rows).values()))


def empty_schedule(
    num_slots: int,
    *,
    num_experts: int,
    block_rows: int,
    order: Order = "column_major",
    device: torch.device | str | None = None,
) -> ExpertSchedule:
    """Memory for the schedule of up to num_slots slots, one allocation, not initialised."""
    _check_sizes(num_experts, block_rows, order)
    _need(num_slots >= 0, f"num_slots {num_slots}", "0 or more", "pass tokens * k")
    shapes = _shapes(num_slots, num_experts, block_rows)
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=device), sizes)
    tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return ExpertSchedule(**tensors, block_rows=block_rows, order=order)


def expert_schedule(
    topk_ids: Tensor,
    *,
    num_experts: int,
    block_rows: int,
    order: Order = "column_major",
    expert_offset: int = 0,
    num_global_experts: int | None = None,
    out: ExpertSchedule | None = None,
    cleared: Tensor | None = None,
    implementation: Implementation = "auto",
) -> ExpertSchedule:
    """Sort the slots of a routing by expert, each expert's from a multiple of block_rows on.

        rows_e   = {s = t * k + j : topk_ids[t, j] - expert_offset = e},  ascending        for e = 0..E-1
        blocks_e = ceil(|rows_e| / block_rows),   first_e = blocks_0 + ... + blocks_(e-1)
        sorted_slots[first_e * block_rows + i] = rows_e[i]  for i < |rows_e|,   and -1 everywhere else

    Args:
        topk_ids: int32 or int64 [T, k], any strides; T may be 0. A negative id means skip; an id that comes twice in a
            row counts twice.
        num_experts: E, experts on this rank.
        block_rows: rows of a block, 1 or more.
        order: kept in the result, see ExpertSchedule.
        expert_offset: the global id of this rank's first expert; only with num_global_experts.
        num_global_experts: experts of all ranks; when given, topk_ids are GLOBAL and this rank holds [expert_offset,
            expert_offset + E). When None, topk_ids are local, 0..E-1.
        out: an ExpertSchedule to write, of `empty_schedule` for as many slots or more; else it is allocated.
        cleared: int32 [n], contiguous, on the device of topk_ids; set to zero by the same launch, for flags of the
            kernels that follow.
        implementation: "auto": the kernel on a GPU that has it, plain torch elsewhere; "reference": plain torch;
            "kernel": the kernel, on the CPU as built for the host.

    Returns:
        ExpertSchedule: `out`, when it was given.

    Raises:
        ContractError: shapes, dtypes, devices or arguments that contradict each other.
        UnsupportedError: with implementation="kernel", what unsupported_reason says or a GPU without the kernel.

    Numerics:
        The same input gives the same bits, by either implementation and on every device. An id outside this rank's
        range is skipped, also one beyond all experts: on the CPU `fused_moe` refuses that one, here it is never read.

    Source: reference.py, kernel.cu. Captured in a CUDA graph: yes, after one call outside (it compiles the kernel;
        without one the capture holds the reference). Memory: workspace_bytes.
    """
    _check_sizes(num_experts, block_rows, order)
    _check_ids(topk_ids, num_experts, expert_offset, num_global_experts)
    _need(
        implementation in ("auto", "reference", "kernel"),
        f"implementation {implementation!r}",
        "auto, reference or kernel",
        "leave it out",
    )
    num_slots = topk_ids.numel()
    if out is None:
        out = empty_schedule(
            num_slots, num_experts=num_experts, block_rows=block_rows, order=order, device=topk_ids.device
        )
    else:
        _check_out(out, topk_ids, num_experts, block_rows, order)
    if cleared is not None:
        _check_tensor("cleared", cleared, topk_ids.device, (0,), False, "pass a vector of flags")
    run = kernel if _use_kernel(implementation, topk_ids, out, cleared) else reference
    run.expert_schedule(topk_ids, expert_offset, out, cleared)
    return out


def _shapes(num_slots: int, num_experts: int, block_rows: int) -> dict[str, tuple[int, ...]]:
    """Of an ExpertSchedule's tensors, in the order of the one allocation: what has to be aligned comes first."""
    blocks = max_blocks(num_slots, num_experts, block_rows)
    return {
        "block_info": (blocks, 4),
        "sorted_slots": (blocks * block_rows,),
        "block_expert": (blocks,),
        "expert_first_block": (num_experts,),
        "expert_rows": (num_experts,),
        "num_blocks": (1,),
    }


def _use_kernel(implementation: str, topk_ids: Tensor, out: ExpertSchedule, cleared: Tensor | None) -> bool:
    if implementation == "reference":
        return False
    reason = unsupported_reason(topk_ids.numel(), out.expert_rows.numel(), out.block_rows)
    longest = max(out.sorted_slots.numel(), 0 if cleared is None else cleared.numel())
    if reason is None and longest > config.MAX_ROWS:
        reason = f"a tensor of {longest} numbers is to be written: the kernel indexes {config.MAX_ROWS} at most"
    if implementation == "auto":
        if reason is not None or not kernel.ready(topk_ids.device):
            return False
    else:
        reason = reason or kernel.device_reason(topk_ids.device)
        if reason is not None:
            raise UnsupportedError(
                reason, "sizes and a device that the kernel covers", "use implementation='reference'"
            )
    # Only here, since a tensor that is traced has no address.
    _need(
        out.block_info.data_ptr() % _INFO_ALIGNMENT == 0,
        f"out.block_info starts at {out.block_info.data_ptr():#x}",
        f"a multiple of {_INFO_ALIGNMENT} bytes",
        "make it with empty_schedule",
    )
    return True


def _need(holds: bool, found: str, needed: str, fix: str) -> None:
    if not holds:
        raise ContractError(found, needed, fix)


def _check_sizes(num_experts: int, block_rows: int, order: str) -> None:
    _need(num_experts >= 1, f"num_experts {num_experts}", "1 or more", "pass the experts on this rank")
    _need(block_rows >= 1, f"block_rows {block_rows}", "1 or more", "pass the GEMM's rows of a tile")
    _need(order in _ORDERS, f"order {order!r}", " or ".join(_ORDERS), "pass one of the two")


def _check_ids(topk_ids: Tensor, num_experts: int, expert_offset: int, num_global_experts: int | None) -> None:
    _need(topk_ids.dim() == 2, f"topk_ids has shape {list(topk_ids.shape)}", "[T, k]", "pass the router's ids")
    integer = topk_ids.dtype in (torch.int32, torch.int64)
    _need(integer, f"topk_ids is {topk_ids.dtype}", "int32 or int64", "convert it")
    if num_global_experts is None:
        _need(
            expert_offset == 0,
            f"expert_offset {expert_offset} without num_global_experts",
            "both, when topk_ids are global; neither, when they are local",
            "pass num_global_experts, or map the ids and pass no offset",
        )
        return
    _need(
        0 <= expert_offset <= num_global_experts - num_experts,
        f"experts {expert_offset} to {expert_offset + num_experts} of {num_global_experts} global ones",
        "a range inside 0 to num_global_experts",
        "pass expert_offset = ep_rank * local experts and the experts of all ranks",
    )


def _check_out(out: ExpertSchedule, topk_ids: Tensor, num_experts: int, block_rows: int, order: str) -> None:
    _need(
        (out.block_rows, out.order) == (block_rows, order),
        f"out is for block_rows {out.block_rows} and order {out.order}",
        f"{block_rows} and {order}, as asked for",
        "make it with empty_schedule and the same arguments",
    )
    fix = "make it with empty_schedule, for the most slots that come"
    for name, shape in _shapes(topk_ids.numel(), num_experts, block_rows).items():
        _check_tensor(f"out.{name}", getattr(out, name), topk_ids.device, shape, name in _EXACT, fix)


def _check_tensor(
    name: str, tensor: Tensor, device: torch.device, shape: tuple[int, ...], exact: bool, fix: str
) -> None:
    """Contiguous int32 of this shape, whose first dimension may be larger unless it is to be exact."""
    _need(
        tensor.dim() == len(shape)
        and tensor.shape[1:] == shape[1:]
        and (tensor.shape[0] == shape[0] if exact else tensor.shape[0] >= shape[0]),
        f"{name} has shape {list(tensor.shape)}",
        f"{list(shape)}{'' if exact else ' or longer'}",
        fix,
    )
    _need(
        tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device == device,
        f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}",
        f"contiguous int32 on {device}, as topk_ids",
        fix,
    )
