"""Launches kernel.cu, on a GPU or as built for the host. No checks here; every result is words of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from sglang_sm120.kernels.communication.p2p_probe import config
from sglang_sm120.kernels.cuda.module import HostModule, KernelModule

SOURCE = Path(__file__).with_name("kernel.cu")
RESULT_WORDS = 4
DONE, TIMED_OUT = 1, 2  # the first word

_Pointers = ctypes.c_void_p * config.MAX_PEERS


class _PatternArgs(ctypes.Structure):
    """PatternArgs in kernel.cu; the others likewise."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("vectors", ctypes.c_int64),
        ("seed", ctypes.c_uint32),
    )


class _ChainArgs(ctypes.Structure):
    _fields_ = (
        ("chain", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("words", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("step", ctypes.c_int),
        ("warmup", ctypes.c_int),
        ("hops", ctypes.c_int),
    )


class _PingPongArgs(ctypes.Structure):
    _fields_ = (
        ("mine", ctypes.c_void_p),
        ("theirs", ctypes.c_void_p),
        ("inbox", ctypes.c_void_p),
        ("outbox", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("first_flag", ctypes.c_uint64),
        ("vectors", ctypes.c_int),
        ("warmup", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("starts", ctypes.c_int),
    )


class _MeetArgs(ctypes.Structure):
    _fields_ = (
        ("mine", _Pointers),
        ("theirs", _Pointers),
        ("result", ctypes.c_void_p),
        ("limit_ns", ctypes.c_uint64),
        ("flag", ctypes.c_uint64),
        ("peers", ctypes.c_int),
    )


class _CopyArgs(ctypes.Structure):
    _fields_ = (
        ("from_", _Pointers),
        ("to", _Pointers),
        ("vectors", ctypes.c_int64),
        ("copies", ctypes.c_int),
    )


class Kernels:
    """The kernels of one device, on its current stream; addresses are of memory that the device reaches."""

    def __init__(self, module: KernelModule | HostModule, result: int) -> None:
        """result: RESULT_WORDS words that the device and the host see."""
        self._module, self._result = module, result

    def fill(self, memory: int, vectors: int, seed: int, first: int = 0) -> None:
        """The pattern, from its vector `first` on."""
        args = _PatternArgs(memory=memory, first=first, vectors=vectors, seed=seed)
        self._module.launch("fill", config.FILL_BLOCKS, config.FILL_THREADS, args)

    def check(self, memory: int, vectors: int, seed: int, first: int = 0) -> None:
        """Result: DONE, the number of wrong words."""
        args = _PatternArgs(memory=memory, result=self._result, first=first, vectors=vectors, seed=seed)
        self._module.launch("check", 1, config.CHECK_THREADS, args)

    def fill_chain(self, chain: int) -> None:
        """What `chase` follows."""
        args = self._chain(chain)
        self._module.launch("fill_chain", config.CHAIN_WORDS // config.FILL_THREADS, config.FILL_THREADS, args)

    def chase(self, chain: int, *, warmup: int, hops: int, limit_ns: int) -> None:
        """Result: status, what the last read returned, nanoseconds of `hops` reads."""
        args = self._chain(chain)
        args.warmup, args.hops, args.limit_ns = warmup, hops, limit_ns
        self._module.launch("chase", 1, 1, args)

    def _chain(self, chain: int) -> _ChainArgs:
        return _ChainArgs(
            chain=chain,
            result=self._result,
            words=config.CHAIN_WORDS,
            stride=config.CHAIN_STRIDE,
            step=config.CHAIN_STEP,
        )

    def ping_pong(
        self,
        mine: int,
        theirs: int,
        *,
        first_flag: int,
        message_bytes: int,
        warmup: int,
        rounds: int,
        starts: bool,
        limit_ns: int,
    ) -> None:
        """Between this window and a peer's, which runs the same with the other `starts`.

        Result: status, wrong words in all messages, nanoseconds of `rounds`.
        """
        args = _PingPongArgs(
            mine=mine + config.flag_offset(0),
            theirs=theirs + config.flag_offset(0),
            inbox=mine + config.INBOX_MESSAGE,
            outbox=theirs + config.INBOX_MESSAGE,
            result=self._result,
            limit_ns=limit_ns,
            first_flag=first_flag,
            vectors=message_bytes // config.VECTOR_BYTES,
            warmup=warmup,
            rounds=rounds,
            starts=starts,
        )
        self._module.launch("ping_pong", 1, config.MESSAGE_THREADS if message_bytes else 32, args)

    def meet(self, mine: Sequence[int], theirs: Sequence[int], *, flag: int, limit_ns: int) -> None:
        """Ends when all peers have come; result: TIMED_OUT in the first word, or nothing."""
        args = _MeetArgs(
            mine=_Pointers(*mine),
            theirs=_Pointers(*theirs),
            result=self._result,
            limit_ns=limit_ns,
            flag=flag,
            peers=len(mine),
        )
        self._module.launch("meet", 1, 32, args)

    def copy(self, sources: Sequence[int], targets: Sequence[int], vectors: int) -> None:
        """Each source to its target, all at once; so many 16-byte vectors each."""
        args = _CopyArgs(from_=_Pointers(*sources), to=_Pointers(*targets), vectors=vectors, copies=len(sources))
        blocks = -(-config.COPY_BLOCKS // len(sources)) * len(sources)
        self._module.launch("copy", blocks, config.COPY_THREADS, args)
