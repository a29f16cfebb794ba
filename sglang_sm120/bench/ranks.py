"""One process a GPU, for benchmarks and tests of what GPUs do together; nothing of it is left when one fails."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_sm120.errors import Sm120Error, UnsupportedError

_EXIT_S = 5.0  # a process whose pipe is closed is about to end


class RankFailedError(Sm120Error, RuntimeError):
    """A rank raised, ended without an answer, or took too long."""


@dataclass
class Rank:
    """What a rank's work is given. The default process group is gloo; device is the current one, `cpu` without GPUs."""

    rank: int
    world_size: int
    device: torch.device
    _connection: Connection = field(repr=False)

    def exchange(self, mine: bytes) -> Sequence[bytes]:
        """All ranks' bytes; returns when every rank has called."""
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, mine)
        return told

    def barrier(self) -> None:
        dist.barrier()

    def progress(self, what: Any) -> None:
        """Tell the parent's `on_progress`; from rank 0 only."""
        if self.rank == 0:
            self._connection.send(("progress", what))


def run_ranks(
    world_size: int,
    work: Callable[..., Any],
    *args: Any,
    time_limit_s: float,
    devices: Sequence[int] | None = None,
    on_progress: Callable[[Any], None] | None = None,
) -> list[Any]:
    """Call work(rank, *args) in `world_size` new processes and return what each gave.

    work: importable by name; args and results can be pickled. devices: CUDA indices; None: 0, 1, ..., or the CPU where
    there is no GPU.

    Raises:
        UnsupportedError: fewer GPUs than ranks. RankFailedError: with the rank's traceback. The others are killed.
    """
    count = torch.cuda.device_count()
    if devices is None:
        devices = range(world_size) if count else ()
    if count and (len(devices) != world_size or max(devices) >= count or min(devices) < 0):
        raise UnsupportedError(
            f"{world_size} ranks on devices {list(devices)}, of {count} GPUs",
            "a GPU for each rank",
            "ask for fewer ranks, or see CUDA_VISIBLE_DEVICES",
        )
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                connections.append(ours)
                device = devices[rank] if count else None
                target = (theirs, Path(folder) / "store", rank, world_size, device, work, args)
                processes.append(context.Process(target=_rank_main, args=target, daemon=True))
                processes[-1].start()
                theirs.close()  # else its end would not close the pipe
            return _collect(processes, connections, time_limit_s, on_progress)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            for connection in connections:
                connection.close()


def _collect(
    processes: list[SpawnProcess],
    connections: list[Connection],
    limit_s: float,
    on_progress: Callable[[Any], None] | None,
) -> list[Any]:
    deadline = time.monotonic() + limit_s
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(connections)) if rank not in results]
            raise RankFailedError(
                f"ranks {late} gave no answer within {limit_s:g} s",
                "GPUs that reach each other's memory",
                "`sglang-sm120 bench p2p` tests the bus",
            )
        failures = []  # of all that are ready: a rank's end makes others fail, and which came first is not known
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = connections.index(connection)
            try:
                kind, value = connection.recv()
            except (EOFError, OSError):  # OSError: in the middle of a message
                processes[rank].join(_EXIT_S)
                kind, value = "failed", f"the process ended without an answer (exit code {processes[rank].exitcode})"
            if kind == "progress":
                if on_progress is not None:
                    on_progress(value)
            elif kind == "failed":
                failures.append(f"rank {rank}: {value}")
            else:
                results[rank] = value
        if failures:
            raise RankFailedError("\n".join(failures), "ranks that run to their end", "see the message above")
    return [results[rank] for rank in range(len(connections))]


def _rank_main(
    connection: Connection, store: Path, rank: int, world_size: int, device: int | None, work: Callable, args: tuple
) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
        where = torch.device("cpu") if device is None else torch.device("cuda", device)
        result = work(Rank(rank, world_size, where, connection), *args)
        connection.send(("done", result))
    except Sm120Error as error:  # says itself what to do
        connection.send(("failed", str(error)))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
