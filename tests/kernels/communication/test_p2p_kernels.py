"""The kernels of the probe on the CPU: what they write and count, that every wait ends. Two ranks are two threads."""

from __future__ import annotations

import ctypes
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cubin_facts
import numpy as np
import pytest

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.communication.p2p_probe import config
from sglang_sm120.kernels.communication.p2p_probe.kernel import DONE, RESULT_WORDS, SOURCE, TIMED_OUT, Kernels
from sglang_sm120.kernels.cuda import build, host_build
from sglang_sm120.kernels.cuda.host_build import HostModule

KERNELS = {"fill", "check", "fill_chain", "chase", "ping_pong", "meet", "copy"}
LONG_NS = 20_000_000_000


def nvrtc_missing() -> str:
    try:
        build.nvrtc_version()
    except UnsupportedError as error:
        return error.found
    return ""


needs_nvrtc = pytest.mark.skipif(nvrtc_missing() != "", reason=nvrtc_missing())


class Rank:
    """A library of its own, so that its kernels run while another rank's do; a window; a result."""

    def __init__(self, folder: Path, number: int) -> None:
        library = folder / f"rank{number}.so"
        shutil.copy(host_build.load(SOURCE)._library._name, library)
        self.result = (ctypes.c_uint32 * RESULT_WORDS)()
        self.kernels = Kernels(HostModule(library, SOURCE), ctypes.addressof(self.result))
        self._memory = np.zeros(config.SOURCE + 64, np.uint8)
        self.window = self._memory.ctypes.data + -self._memory.ctypes.data % 16

    def words(self, offset: int, count: int) -> np.ndarray:
        start = self.window - self._memory.ctypes.data + offset
        return self._memory[start : start + 4 * count].view(np.uint32)


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    return [Rank(tmp_path, number) for number in range(2)]


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.zeros(num_bytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + num_bytes]


def pattern(seed: int, first_vector: int, vectors: int) -> np.ndarray:
    """In Python's whole numbers."""
    low = 2**32 - 1

    def word(number: int) -> int:
        x = (number & low) * 0x9E3779B9 & low ^ number >> 32 ^ seed * 0x85EBCA6B & low
        x = (x ^ x >> 16) * 0x7FEB352D & low
        x = (x ^ x >> 15) * 0x846CA68B & low
        return x ^ x >> 16

    return np.array([word(4 * first_vector + i) for i in range(4 * vectors)], np.uint32)


def together(*calls: Callable[[], None]) -> None:
    """Each in a thread of its own; an exception in one is raised here."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("seed", "first", "vectors"), [(1, 0, 1), (0xFFFFFFFF, 3, 300), (77, 2**31, 20)])
def test_the_pattern(ranks: list[Rank], seed: int, first: int, vectors: int) -> None:
    memory = aligned(16 * (vectors + 1))
    memory[-16:] = 0xAA
    ranks[0].kernels.fill(memory.ctypes.data, vectors, seed, first)
    assert (memory[:-16].view(np.uint32) == pattern(seed, first, vectors)).all()
    assert (memory[-16:] == 0xAA).all(), "and nothing behind it"


def test_wrong_words_are_counted(ranks: list[Rank]) -> None:
    vectors = 2500
    memory = aligned(16 * vectors)
    kernels, result = ranks[0].kernels, ranks[0].result
    kernels.fill(memory.ctypes.data, vectors, 5)
    kernels.check(memory.ctypes.data, vectors, 5)
    assert (result[0], result[1]) == (DONE, 0)
    kernels.check(memory.ctypes.data, vectors, 6)
    assert result[1] == 4 * vectors, "another seed: nothing is right"
    kernels.check(memory.ctypes.data, vectors, 5, first=1)
    assert result[1] == 4 * vectors, "from another place on: nothing is right"
    words = memory.view(np.uint32)
    for place in (0, 4095, 4096, 4 * vectors - 1):
        words[place] ^= 1 << 7
    kernels.check(memory.ctypes.data, vectors, 5)
    assert result[1] == 4


@pytest.mark.parametrize("vectors", [1, 511, 5 * 512 * 64 + 37])
@pytest.mark.parametrize("copies", [1, 3, config.MAX_PEERS])
def test_copies(ranks: list[Rank], vectors: int, copies: int) -> None:
    if vectors > 1000 and copies > 1:
        vectors = 3000
    rng = np.random.default_rng(0)
    sources = [aligned(16 * vectors) for _ in range(copies)]
    targets = [aligned(16 * (vectors + 1)) for _ in range(copies)]
    for source in sources:
        source[:] = rng.integers(0, 256, source.size, np.uint8)
    ranks[0].kernels.copy([x.ctypes.data for x in sources], [x.ctypes.data for x in targets], vectors)
    for source, target in zip(sources, targets, strict=True):
        assert (target[:-16] == source).all()
        assert not target[-16:].any()


def test_a_chain_visits_every_word(ranks: list[Rank]) -> None:
    kernels, result = ranks[0].kernels, ranks[0].result
    chain = ranks[0].window + config.CHAIN
    kernels.fill_chain(chain)
    seen, at = set(), 0
    for _ in range(config.CHAIN_WORDS):
        at = int(ranks[0].words(config.CHAIN + at, 1)[0])
        seen.add(at)
    assert seen == set(range(0, config.CHAIN_WORDS * config.CHAIN_STRIDE, config.CHAIN_STRIDE))
    for warmup, hops in ((0, 1), (2, 5000)):
        kernels.chase(chain, warmup=warmup, hops=hops, limit_ns=LONG_NS)
        assert (result[0], result[1]) == (DONE, config.last_of_chain(warmup + hops))
        assert 0 < result[2] < 1e9
    kernels.chase(chain, warmup=0, hops=10_000_000, limit_ns=1)
    assert result[0] == TIMED_OUT


@pytest.mark.parametrize("message_bytes", [0, 16, 5000 // 16 * 16])
def test_ping_pong_of_two_ranks(ranks: list[Rank], message_bytes: int) -> None:
    one, other = ranks

    def rank(here: Rank, there: Rank, starts: bool) -> Callable[[], None]:
        return lambda: here.kernels.ping_pong(
            here.window, there.window, first_flag=10, message_bytes=message_bytes, warmup=1, rounds=20, starts=starts,
            limit_ns=LONG_NS,
        )  # fmt: skip

    together(rank(one, other, True), rank(other, one, False))
    for of in ranks:
        assert (of.result[0], of.result[1]) == (DONE, 0)
        assert 0 < of.result[2] | of.result[3] << 32 < LONG_NS
        assert of.words(config.flag_offset(0), 1)[0] == 10 + 20
        vectors = message_bytes // 16
        last = of.words(config.INBOX_MESSAGE, 4 * vectors + 4)
        assert (last[: 4 * vectors] == pattern(30, 0, vectors)).all()
        assert not last[4 * vectors :].any()


def test_a_message_that_does_not_come_with_its_flag_is_noticed(ranks: list[Rank]) -> None:
    """One rank's messages go elsewhere."""
    one, other = ranks
    lost = aligned(config.CHAIN)

    def send_astray() -> None:
        module = one.kernels._module
        launch = module.launch

        def patched(name: str, grid: int, block: int, args: ctypes.Structure, **more: object) -> None:
            args.outbox = lost.ctypes.data
            launch(name, grid, block, args, **more)

        module.launch = patched  # type: ignore[method-assign]
        one.kernels.ping_pong(
            one.window, other.window, first_flag=1, message_bytes=64, warmup=0, rounds=3, starts=True, limit_ns=LONG_NS
        )

    together(
        send_astray,
        lambda: other.kernels.ping_pong(
            other.window, one.window, first_flag=1, message_bytes=64, warmup=0, rounds=3, starts=False,
            limit_ns=LONG_NS,
        ),
    )  # fmt: skip
    assert (one.result[0], one.result[1]) == (DONE, 0)
    assert (other.result[0], other.result[1]) == (DONE, 3 * 16)


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("message_bytes", [0, 256])
def test_ping_pong_without_a_peer_ends(ranks: list[Rank], starts: bool, message_bytes: int) -> None:
    one, other = ranks
    start = time.monotonic()
    one.kernels.ping_pong(
        one.window, other.window, first_flag=1, message_bytes=message_bytes, warmup=0, rounds=5, starts=starts,
        limit_ns=200_000_000,
    )  # fmt: skip
    assert one.result[0] == TIMED_OUT
    assert 0.2 <= time.monotonic() - start < 5


def test_a_flag_of_an_earlier_run_is_not_taken(ranks: list[Rank]) -> None:
    one, other = ranks
    one.words(config.flag_offset(0), 1)[0] = 9
    one.kernels.ping_pong(
        one.window, other.window, first_flag=10, message_bytes=0, warmup=0, rounds=1, starts=False, limit_ns=1000
    )
    assert one.result[0] == TIMED_OUT


def test_meeting(ranks: list[Rank]) -> None:
    one, other = ranks
    ended: dict[Rank, float] = {}

    def come(here: Rank, there: Rank, place: int, late_s: float) -> Callable[[], None]:
        def run() -> None:
            time.sleep(late_s)
            mine = here.window + config.flag_offset(1 + (1 - place))
            theirs = there.window + config.flag_offset(1 + place)
            here.kernels.meet([mine], [theirs], flag=4, limit_ns=LONG_NS)
            ended[here] = time.monotonic()

        return run

    start = time.monotonic()
    together(come(one, other, 0, 0.0), come(other, one, 1, 0.3))
    assert min(ended.values()) - start >= 0.3
    assert (one.result[0], other.result[0]) == (0, 0)
    one.kernels.meet([one.window], [other.window], flag=5, limit_ns=1000)
    assert one.result[0] == TIMED_OUT
    start = time.monotonic()
    one.kernels.meet([one.window], [other.window], flag=6, limit_ns=LONG_NS)
    assert time.monotonic() - start < 1, "after one who did not come, the others are not waited for"


def test_nothing_in_a_window_overlaps() -> None:
    assert config.Sizes().window_bytes == config.SOURCE + 2 * config.Sizes().data_bytes
    assert config.CHAIN + config.CHAIN_WORDS * config.CHAIN_STRIDE <= config.SOURCE
    assert config.INBOX_MESSAGE + config.MAX_MESSAGE_BYTES <= config.CHAIN
    assert config.flag_offset(2 + config.MAX_PEERS + 1) <= config.INBOX_MESSAGE
    for wrong in (
        {"data_bytes": 1000},
        {"message_bytes": 8},
        {"message_bytes": 1 << 20},
        {"rounds": 0},
        {"warmup": -1},
    ):
        with pytest.raises(ContractError):
            config.Sizes(**wrong)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_120a", "sm_90a"])
def test_it_compiles_for_gpus(arch: str) -> None:
    cubin = build.compile_cubin(SOURCE, arch)
    assert cubin[:4] == b"\x7fELF"
    if not cubin_facts.available():
        return
    facts = cubin_facts.facts(cubin)
    assert facts.keys() == KERNELS
    for name, fact in facts.items():
        assert (fact.stack_bytes, fact.local_bytes) == (0, 0), f"{name} spills"
    assert facts["chase"].opcodes["LDG.E.STRONG.SYS"] >= 1, "a read past the caches that are not the memory's own"
    assert facts["ping_pong"].count("MEMBAR") >= 1, "a message is there before its flag"
    assert facts["meet"].opcodes["STG.E.64.STRONG.SYS"] >= 1
    wide = facts["copy"].opcodes
    assert wide["LDG.E.128"] >= 4 <= wide["STG.E.128"], "16 bytes at once, four in flight"
