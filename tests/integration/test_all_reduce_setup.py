"""Setting up: all ranks or none, a trial that notices what is wrong, and the CPU's stand-in between real processes."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120.bench.ranks import run_ranks
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.integration import all_reduce_setup as setup
from sglang_sm120.integration.all_reduce_plane import GpuPlane, HostPlane
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.kernels.communication.all_reduce_rmsnorm import config, reference
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import Communicator, Range
from sglang_sm120.kernels.communication.window import host_windows
from sglang_sm120.tune import comm_profile
from tests.integration import all_reduce_work

HIDDEN = 256
RANGES = (Range(8 << 10, config.LAMPORT), Range(32 << 10, config.TWO_SHOT_PUSH))


class Group:
    """Ranks as threads, with an exchange between them; and what SGLang's GroupCoordinator has."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.told = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.rounds = 0

    def exchange_of(self, rank: int) -> setup.Exchange:
        def exchange(message: bytes) -> list[bytes]:
            self.told[rank] = message
            self.barrier.wait()
            heard = list(self.told)
            self.rounds += rank == 0
            self.barrier.wait()
            return heard

        return exchange

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` gives or raises on every rank."""
        results: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def communicators(world_size: int) -> list[Communicator]:
    space = config.space_for(RANGES, world_size, HIDDEN)
    return [
        Communicator(window, space, RANGES, limit_s=60)
        for window in host_windows(world_size, config.window_bytes(space))
    ]


@pytest.fixture
def host_copy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The driver's copy between windows on the CPU; what was copied."""
    copied = []

    def copy(destination: int, source: int, num_bytes: int) -> None:
        copied.append((destination, source, num_bytes))
        ctypes.memmove(destination, source, num_bytes)

    monkeypatch.setattr(ipc, "copy", copy)
    return copied


@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_reach_every_peer_and_leave_windows_zero(world_size: int, host_copy) -> None:
    group, ranks = Group(world_size), communicators(world_size)
    assert group.run(lambda rank: setup._try_copies(ranks[rank], group.exchange_of(rank))) == [None] * world_size
    for communicator in ranks:
        window = communicator.window
        for address in window.addresses:
            assert not any(ctypes.string_at(address, window.num_bytes))


@pytest.mark.parametrize("fault", ["lost", "elsewhere", "refused"])
def test_memory_that_does_not_reach_a_peer_is_named_before_a_kernel_waits(fault: str, host_copy, monkeypatch) -> None:
    """Writes of rank 0 to rank 1 are lost, go elsewhere, or are refused by the driver."""
    group, ranks = Group(2), communicators(2)
    target = ranks[0].window.addresses[1] + config.DATA_AT
    copy = ipc.copy

    def broken(destination: int, source: int, num_bytes: int) -> None:
        if destination == target:
            if fault == "refused":
                raise UnsupportedError("cuMemcpyDtoD failed: CUDA_ERROR_LAUNCH_FAILED", "n", "f")
            if fault == "elsewhere":
                copy(destination + 256, source, num_bytes)
            return
        copy(destination, source, num_bytes)

    monkeypatch.setattr(ipc, "copy", broken)
    results = group.run(lambda rank: setup._try_copies(ranks[rank], group.exchange_of(rank)))
    says = {"refused": "rank 0: peer-to-peer memory does not work: cuMemcpyDtoD failed"}.get(
        fault, "rank 1: peer-to-peer memory does not work: RuntimeError: rank 0's writes here do not arrive"
    )
    for result in results:
        assert isinstance(result, UnsupportedError)
        assert result.found.startswith(says)
        assert "sglang-sm120 bench p2p" in result.fix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_kernels_pass_their_trial(world_size: int, dtype: torch.dtype) -> None:
    group, ranks = Group(world_size), communicators(world_size)
    assert group.run(lambda rank: setup._try_kernels(ranks[rank], HIDDEN, dtype)) == [None] * world_size


@pytest.mark.parametrize("what", ["sum", "residual", "norm"])
def test_a_wrong_result_is_noticed_after_all_calls_were_made(what: str, monkeypatch) -> None:
    """One rank that stopped at the first would leave the others waiting in the next."""
    group, ranks = Group(2), communicators(2)
    calls = [0, 0]
    plain, fused = Communicator.all_reduce, Communicator.all_reduce_rmsnorm

    def wrong_sum(self, x):
        calls[self.window.rank] += 1
        return plain(self, x) + (what == "sum" and self.window.rank == 1)

    def wrong_fused(self, *arguments):
        out, residual = fused(self, *arguments)
        at_fault = self.window.rank == 1
        return out + (what == "norm" and at_fault), residual + (what == "residual" and at_fault)

    monkeypatch.setattr(Communicator, "all_reduce", wrong_sum)
    monkeypatch.setattr(Communicator, "all_reduce_rmsnorm", wrong_fused)
    first, second = group.run(lambda rank: setup._try_kernels(ranks[rank], HIDDEN, torch.bfloat16))
    assert first is None
    how = f"by {config.LAMPORT}" if what == "sum" else f"with a norm by {config.LAMPORT}"
    assert f"1 x {HIDDEN} {how} is not what plain torch gives" in str(second)
    assert calls == [4 * len(ranks[0].ranges)] * 2, "two sizes of each range, twice"


class OnGpu:
    """`connect` on windows of the CPU: what it does on a GPU, step by step."""

    def __init__(self, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group, self.closed, self.ranks = group, [], communicators(group.world_size)
        self.asked: list[dict] = []
        monkeypatch.setattr(setup, "load", lambda source, device: None)
        monkeypatch.setattr(setup, "exchange_of", lambda coordinator: group.exchange_of(coordinator.rank_in_group))
        monkeypatch.setattr(setup.Communicator, "connect", self._connect)
        monkeypatch.setattr(setup.Communicator, "close", lambda communicator: self.closed.append(communicator))
        self.patch = monkeypatch.setattr

    def _connect(self, rank: int, world_size: int, exchange: Any, **asked: Any) -> Communicator:
        self.asked.append(asked)
        return self.ranks[rank]

    def run(
        self, choice: str = "auto", dtype: torch.dtype = torch.bfloat16, hidden_size: int = HIDDEN, profile: str = ""
    ) -> list[Any]:
        def one(rank: int) -> Any:
            coordinator = SimpleNamespace(rank_in_group=rank, world_size=self.group.world_size)
            return setup.connect(
                coordinator,
                choice,
                hidden_size=hidden_size,
                dtype=dtype,
                device=torch.device("cuda", rank),
                profile=profile,
            )

        return self.group.run(one)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, host_copy) -> OnGpu:
    return OnGpu(Group(2), monkeypatch)


def test_a_group_is_set_up_tried_and_given_time_to_serve(on_gpu: OnGpu) -> None:
    planes = on_gpu.run()
    assert all(isinstance(plane, GpuPlane) for plane in planes), planes
    assert {plane._communicator.window.status[1] for plane in planes} == {setup.SERVING_LIMIT_S * 1000}
    assert on_gpu.asked[0]["ranges"] == config.DEFAULT_RANGES[2]
    assert "one-shot-lamport up to 8 KiB, two-shot-push up to 32 KiB; windows of " in planes[0].describe()
    assert not on_gpu.closed


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"dtype": torch.float32}, "float32 is not covered"), ({"hidden_size": 100}, "hidden size 100 is not covered")],
)
def test_what_the_kernels_do_not_cover_is_known_before_anything_is_shared(changed, says, on_gpu: OnGpu) -> None:
    for result in on_gpu.run(**changed):
        assert isinstance(result, UnsupportedError)
        assert says in result.found
    assert not on_gpu.asked
    assert on_gpu.group.rounds == 0


@pytest.mark.parametrize("step", ["load", "copy", "_try_kernels"])
def test_a_step_that_fails_on_one_rank_ends_all_and_gives_the_memory_back(step: str, on_gpu: OnGpu) -> None:
    copy, calls = ipc.copy, itertools.count()

    def fail(*arguments: Any) -> None:
        if next(calls) == 0:
            raise RuntimeError("not on this one")
        if step == "copy":
            copy(*arguments)

    on_gpu.patch(ipc if step == "copy" else setup, step, fail)
    results = on_gpu.run()
    assert {type(result) for result in results} == {UnsupportedError}, results
    assert len({result.found for result in results}) == 1
    assert "not on this one" in results[0].found
    assert len(on_gpu.closed) == (0 if step == "load" else 2)


def test_a_rank_whose_kernel_gave_up_says_so_itself(on_gpu: OnGpu) -> None:
    """Its CUDA context is lost: going on without our kernels would end in an error that says nothing."""
    from sglang_sm120.kernels.communication.all_reduce_rmsnorm.api import PeerLostError

    def give_up(communicator: Communicator, *rest: Any) -> None:
        if communicator.window.rank == 1:
            communicator.window.status[0] = 1
            raise RuntimeError("CUDA error: unspecified launch failure")

    on_gpu.patch(setup, "_try_kernels", give_up)
    first, second = on_gpu.run()
    assert isinstance(first, UnsupportedError)
    assert isinstance(second, PeerLostError)


@pytest.mark.parametrize("world_size", config.WORLD_SIZES)
def test_a_family_serves_all_that_the_windows_are_made_for(world_size: int) -> None:
    default = config.DEFAULT_RANGES[world_size]
    assert setup.ranges_for("auto", world_size) == (default, default)
    for family in ("one-shot", "two-shot"):
        (only,), with_norm = setup.ranges_for(family, world_size)
        assert only.algorithm.startswith(family) and with_norm == (only,)
        assert only.max_bytes == setup.NAMED_BYTES


class Measured:
    """A profile, as far as the server asks it."""

    def __init__(self, plain: tuple[Range, ...], norm: tuple[Range, ...]) -> None:
        self._ranges = {False: plain, True: norm}

    def ranges(self, *, fused: bool) -> tuple[Range, ...]:
        return self._ranges[fused]


def test_the_hosts_profile_decides() -> None:
    plain = (Range(1 << 20, config.STOCK),)
    norm = (Range(64 << 10, config.ONE_SHOT_PULL), Range(2 << 20, config.TWO_SHOT_PULL))
    assert setup.ranges_for("auto", 4, Measured(plain, norm), hidden_size=6144) == (plain, norm)
    assert setup.ranges_for("auto", 4, Measured((), ()), hidden_size=6144) == ((), ())


def test_what_needs_too_large_a_window_is_left_to_sglang() -> None:
    norm = (Range(64 << 10, config.LAMPORT), Range(32 << 20, config.ONE_SHOT_PUSH))
    plain, with_norm = setup.ranges_for("auto", 8, Measured((), norm), hidden_size=6144)
    assert plain == () and with_norm[0] == norm[0]
    assert with_norm[1].algorithm == config.ONE_SHOT_PUSH and 1 << 20 < with_norm[1].max_bytes < 32 << 20
    size = setup.workspace_bytes(with_norm, world_size=8, hidden_size=6144)
    assert setup.WINDOW_LIMIT_BYTES // 4 < size <= setup.WINDOW_LIMIT_BYTES


class Files:
    """What each rank finds at the path that it reads: a profile, an error, or None for no file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *of_ranks: Any) -> None:
        self.of_ranks, self.asked = of_ranks, []
        self.rank = threading.local()
        monkeypatch.setattr(setup.comm_profile, "for_server", self.read)
        monkeypatch.setattr(setup.comm_profile, "for_server_named", self.read)

    def read(self, *asked: Any) -> Any:
        self.asked.append(asked)
        found = self.of_ranks[self.rank.number]
        if isinstance(found, Exception):
            raise found
        return found

    def choose(self, named: str = "") -> list[Any]:
        group = Group(len(self.of_ranks))

        def one(rank: int) -> Any:
            self.rank.number = rank
            return setup._profile(named, group.exchange_of(rank), len(self.of_ranks), 6144, torch.bfloat16)

        results = group.run(one)
        assert group.rounds == 1, "one exchange, whatever was found"
        return results


SMALL = Measured((Range(1 << 10, config.LAMPORT),), (Range(1 << 12, config.LAMPORT),))
LARGE = Measured((Range(1 << 10, config.LAMPORT),), (Range(1 << 13, config.LAMPORT),))
ELSEWHERE = ConfigError("all-reduce profile p was measured elsewhere", "one of this machine", "measure")


@pytest.mark.parametrize(
    ("of_ranks", "says"),
    [
        ((ELSEWHERE, ELSEWHERE), "p was measured elsewhere"),
        ((SMALL, ELSEWHERE), "p was measured elsewhere"),
        ((SMALL, LARGE), "ranks have read different ones"),
        ((SMALL, None), "ranks have read different ones"),
    ],
)
def test_a_profile_that_does_not_fit_on_any_rank_is_used_on_none(of_ranks, says, monkeypatch, caplog) -> None:
    files = Files(monkeypatch, *of_ranks)
    with caplog.at_level("INFO"):
        assert files.choose() == [None, None]
    assert (
        caplog.text.count(f"all-reduce by the shipped default: all-reduce profile {'p' if says[0] == 'p' else ''}") == 2
    )
    assert says in caplog.text
    for result in files.choose("p.json"):
        assert isinstance(result, ConfigError)
        assert says in result.found
        assert result.needed and result.fix


def test_all_ranks_choose_by_the_profile_that_fits(monkeypatch, caplog) -> None:
    files = Files(monkeypatch, SMALL, SMALL)
    with caplog.at_level("INFO"):
        assert files.choose() == [SMALL, SMALL]
        assert files.asked == [(None, 2, 6144, "bfloat16")] * 2
        assert files.choose("p.json") == [SMALL, SMALL]
        assert files.asked[2:] == [("p.json", 2, 6144, "bfloat16")] * 2
        assert Files(monkeypatch, None, None).choose() == [None, None]
    assert not caplog.text


def test_a_profile_that_was_named_decides_when_a_group_is_set_up(on_gpu: OnGpu, tmp_path) -> None:
    """A file, as `tune --comm` writes it."""
    from sglang_sm120.runners.profile import current_machine

    def write(hidden_size: int) -> str:
        candidates = [
            comm_profile.CommCandidate(name=name, samples_us=[us])
            for name, us in ((config.LAMPORT, 2.0), ("nccl", 9.0))
        ]
        points = [
            comm_profile.CommPoint(rows=4, bytes=8 * hidden_size, fused=fused, candidates=candidates)
            for fused in (True, False)
        ]
        path = tmp_path / f"{hidden_size}.json"
        comm_profile.write(
            comm_profile.CommProfile(
                format=comm_profile.FORMAT, created="now", command="", machine=current_machine(), gpus=["a", "b"],
                link="PCIe", world_size=2, hidden_size=hidden_size, dtype="bfloat16", baseline="none", missing=[],
                points=points,
            ),
            path,
        )  # fmt: skip
        return str(path)

    planes = on_gpu.run(profile=write(HIDDEN))
    assert all(isinstance(plane, GpuPlane) for plane in planes), planes
    assert on_gpu.asked[0]["ranges"] == on_gpu.asked[0]["norm_ranges"] == (Range(8 * HIDDEN, config.LAMPORT),)
    on_gpu.asked.clear()
    for path, says in (
        (write(2 * HIDDEN), f"it is of hidden size {2 * HIDDEN}, not {HIDDEN}"),
        (str(tmp_path / "absent.json"), "No such file"),
    ):
        for result in on_gpu.run(profile=path):
            assert isinstance(result, ConfigError)
            assert says in result.found
    assert not on_gpu.asked, "before anything is shared"


def host_plane() -> HostPlane:
    return HostPlane(SimpleNamespace(world_size=2), setup.ranges_for("auto", 2)[0])


def test_what_is_taken_depends_on_shape_dtype_and_layout_alone() -> None:
    plane = host_plane()
    limit = plane.ranges[-1].max_bytes // 2
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert plane.takes(torch.empty(4, 64, dtype=dtype), norm=True)
        assert plane.takes(torch.empty(limit, dtype=dtype))
        assert not plane.takes(torch.empty(limit + 8, dtype=dtype)), "the same sizes as on a GPU"
    assert not plane.takes(torch.empty(4, 64, dtype=torch.int32))
    assert not plane.takes(torch.empty(4, 64, device="meta"))
    assert not plane.takes(torch.empty(64, 4).T)
    assert not plane.takes(torch.empty(0, 64))
    assert not plane.takes(torch.empty(3, 5))
    assert plane.takes(torch.empty(2, 4, 64))
    assert not plane.takes(torch.empty(2, 4, 64), norm=True)
    at_an_odd_address = torch.empty(65, dtype=torch.bfloat16)[1:]
    assert plane.takes(at_an_odd_address), "addresses differ from rank to rank"


def test_an_address_that_the_kernels_cannot_take_is_copied(on_gpu: OnGpu) -> None:
    planes = on_gpu.run()
    memory = torch.arange(3 * HIDDEN + 1, dtype=torch.bfloat16) % 5
    x = memory[1:].view(3, HIDDEN)
    assert x.data_ptr() % 16

    def work(rank: int) -> Any:
        planes[rank].device_type = "cpu"
        assert planes[rank].takes(x)
        return planes[rank].all_reduce(x), *planes[rank].all_reduce_rmsnorm(x, x, torch.ones_like(x[0]), 1e-5)

    for total, out, residual in on_gpu.group.run(work):
        wanted, kept = reference.all_reduce_rmsnorm([x, x], x, torch.ones_like(x[0]), 1e-5)
        assert torch.equal(total, 2 * x)
        assert torch.equal(residual, kept)
        assert torch.allclose(out.float(), wanted.float(), rtol=2**-7)


@pytest.mark.parametrize("world_size", [2, 4])
def test_on_the_cpu_all_ranks_get_the_same_bits(world_size: int) -> None:
    devices = [0] * world_size if torch.cuda.is_available() else None
    first, *others = run_ranks(world_size, all_reduce_work.sums_on_the_cpu, time_limit_s=240.0, devices=devices)
    assert len(first) == 3
    assert all(other == first for other in others)
