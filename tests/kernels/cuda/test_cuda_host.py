"""The CPU emulation of CUDA blocks: each collective of collectives.cu against numpy, and the faults that it reports."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sm120.errors import ConfigError, ContractError, UnsupportedError
from sglang_sm120.kernels.cuda import build, host_build
from sglang_sm120.kernels.cuda.module import HostModule, load

SOURCE = Path(__file__).with_name("collectives.cu")
ALL = 0xFFFFFFFF
UNTOUCHED = 0xABCDABCD
ORDERS = [(), ("SM120_HOST_REVERSE",)]


class Args(ctypes.Structure):
    _fields_ = (("input", ctypes.c_void_p), ("out", ctypes.c_void_p), ("n", ctypes.c_uint), ("mask", ctypes.c_uint))


@pytest.fixture(params=ORDERS, ids=["ascending", "descending"])
def order(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


def run(
    name: str, grid: int, block: int, values: np.ndarray, *, n: int = 0, mask: int = ALL, size: int | None = None,
    shared_bytes: int = 0, defines: tuple[str, ...] = (), start: int = UNTOUCHED,
) -> np.ndarray:  # fmt: skip
    module = load(SOURCE, torch.device("cpu"), defines)
    assert isinstance(module, HostModule)
    values = np.ascontiguousarray(values, dtype=np.uint32)
    out = np.full(grid * block if size is None else size, start, np.uint32)
    module.launch(name, grid, block, Args(values.ctypes.data, out.ctypes.data, n, mask), shared_bytes=shared_bytes)
    return out


def random(count: int, limit: int = 1 << 32) -> np.ndarray:
    return np.random.default_rng(count).integers(0, limit, count, dtype=np.uint32)


@pytest.mark.parametrize("width", [32, 16, 4])
def test_shuffle(width: int, order: tuple[str, ...]) -> None:
    values, source = random(64), random(65, 64)[:64]
    lane = np.arange(64)
    expected = values[lane // width * width + source % width]
    found = run("shuffle", 1, 64, np.concatenate([values, source]), mask=width, defines=order)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("delta", [0, 1, 5, 31])
@pytest.mark.parametrize("width", [32, 8])
def test_shuffles_by_distance(delta: int, width: int, order: tuple[str, ...]) -> None:
    values, lane = random(64), np.arange(64)
    inside = lane % width
    for name, source, valid in (
        ("shuffle_up", lane - delta, inside >= delta),
        ("shuffle_down", lane + delta, inside + delta < width),
        ("shuffle_xor", lane // 32 * 32 + (lane % 32 ^ delta), (lane % 32 ^ delta) < (lane % 32 // width + 1) * width),
    ):
        expected = values[np.where(valid, source, lane)]
        np.testing.assert_array_equal(run(name, 1, 64, values, n=delta, mask=width, defines=order), expected, name)


def test_shuffle_of_8_bytes() -> None:
    values = random(32)
    found = run("shuffle_8_bytes", 1, 32, values, size=64).reshape(32, 2)
    np.testing.assert_array_equal(found, np.stack([np.arange(32) ^ 1, values[np.arange(32) ^ 1]], 1))


@pytest.mark.parametrize("mask", [ALL, 0x0000FFFF, 0x80000001, 0x5A5A0010])
def test_folds_over_the_lanes_of_a_mask(mask: int, order: tuple[str, ...]) -> None:
    values = random(32) % 5 * 1_000_000_007  # few different ones, and a sum that wraps
    chosen = np.array([mask >> lane & 1 for lane in range(32)], bool)
    bits = np.where(chosen, np.uint32(1) << np.arange(32, dtype=np.uint32), 0)
    expected = {
        "ballot": np.full(32, bits[values != 0].sum()),
        "match_any": np.array([bits[values == value].sum() for value in values]),
        "reduce_add": np.full(32, values[chosen].sum(dtype=np.uint32)),
        "reduce_max": np.full(32, values[chosen].max()),
        "reduce_min": np.full(32, values[chosen].min()),
    }
    for name, result in expected.items():
        found = run(name, 1, 32, values, mask=mask, defines=order)
        np.testing.assert_array_equal(found, np.where(chosen, result, UNTOUCHED).astype(np.uint32), name)


@pytest.mark.parametrize(("values", "result"), [([0] * 32, 0), ([1] * 31 + [0], 1), ([3] * 32, 3)])
def test_any_and_all(values: list[int], result: int) -> None:
    np.testing.assert_array_equal(run("any_all", 1, 32, np.array(values)), [result] * 32)


def test_groups_of_a_warp_meet_separately(order: tuple[str, ...]) -> None:
    values, lane = random(32), np.arange(32)
    expected = np.where(lane < 16, values[:16].sum(dtype=np.uint32), values[lane ^ 3])
    np.testing.assert_array_equal(run("two_groups", 1, 32, values, defines=order), expected)


def test_a_collective_that_one_warp_reaches(order: tuple[str, ...]) -> None:
    values = random(96)
    expected = np.full(96, UNTOUCHED, np.uint32)
    expected[32:64] = values[32:64].sum(dtype=np.uint32)
    np.testing.assert_array_equal(run("one_warp", 1, 96, values, defines=order), expected)


def test_warps_of_a_block_do_different_numbers_of_collectives(order: tuple[str, ...]) -> None:
    values = random(128)
    per_warp = values.reshape(4, 32).sum(1, dtype=np.uint32) * np.arange(1, 5, dtype=np.uint32)
    expected = np.full(128, per_warp.sum(dtype=np.uint32))
    np.testing.assert_array_equal(run("uneven_warps", 1, 128, values, defines=order), expected)


@pytest.mark.parametrize("count", [1, 20, 31])
def test_lanes_that_exited_or_never_were_do_not_take_part(count: int, order: tuple[str, ...]) -> None:
    values = random(32)
    expected = np.full(32, UNTOUCHED, np.uint32)
    expected[:count] = values[:count].sum(dtype=np.uint32)
    np.testing.assert_array_equal(run("exited_lanes", 1, 32, values, n=count, defines=order), expected)
    np.testing.assert_array_equal(run("exited_lanes", 1, count, values, n=32, defines=order), expected[:count])
    assert run("shuffle_from_exited", 1, 32, values, n=count)[0] == ALL, "an exited lane has no value: poison"


@pytest.mark.parametrize("count", [1, 33, 64, 127, 128])
def test_the_barrier_counts_threads_that_are_alive(count: int, order: tuple[str, ...]) -> None:
    expected = np.where(np.arange(256) % 128 < count, np.arange(256) // 128 * 128 + 5, UNTOUCHED)
    np.testing.assert_array_equal(run("exited_threads", 2, 128, np.arange(256) + 5, n=count, defines=order), expected)


@pytest.mark.parametrize("block", [32, 96, 100, 1024])
def test_threads_read_each_others_shared_memory(block: int, order: tuple[str, ...]) -> None:
    values = random(3 * block)
    expected = np.roll(values.reshape(3, block), 1, axis=1).reshape(-1)
    np.testing.assert_array_equal(run("neighbour", 3, block, values, defines=order), expected)
    found = run("dynamic_neighbour", 3, block, values, shared_bytes=4 * block, defines=order)
    np.testing.assert_array_equal(found, expected)


def test_a_missing_barrier_shows_in_one_of_the_orders() -> None:
    values = random(64)
    expected = np.roll(values, 1)
    found = [run("neighbour", 1, 64, values, mask=0, defines=defines) for defines in ORDERS]
    assert not all(np.array_equal(result, expected) for result in found)
    assert any((result == ALL).any() for result in found), "what was not written yet is poison"


def test_shared_memory_that_was_not_written_is_poison_in_every_block() -> None:
    for _ in range(2):
        assert (run("unwritten_static", 3, 64, random(1)) == ALL).all()
        assert (run("unwritten_dynamic", 3, 64, random(1), shared_bytes=256) == ALL).all()
    assert (run("two_instances", 2, 64, random(1)) == ALL).all(), "one instance's memory is not the other's"


def test_atomics_and_a_lock(order: tuple[str, ...]) -> None:
    out = run("atomics", 1, 96, np.zeros(1), n=0, size=100, start=0, defines=order)
    assert out[:4].tolist() == [96, 96 % 5, 0, 96 * 95 // 2]
    np.testing.assert_array_equal(np.sort(out[4:]), np.arange(96))


def test_integer_intrinsics() -> None:
    values = [0, 1, 2, 0x80000000, ALL, 0x00F0]
    found = run("integers", 1, 6, np.array(values, np.uint32), size=18).reshape(6, 3)
    ffs = [(x & -x).bit_length() for x in values]
    np.testing.assert_array_equal(
        found, [[x.bit_count(), 32 - x.bit_length(), f] for x, f in zip(values, ffs, strict=True)]
    )


@pytest.mark.parametrize(
    ("name", "block", "n", "mask", "message"),
    [
        ("divergent_barrier", 64, 0, 0, r"deadlock.* 0 on waits at __syncthreads; thread 40 on waits at __syncwarp"),
        ("mixed_collectives", 32, 0, 0, r"deadlock.* 0 on waits at __reduce_add_sync.* 1 on waits at __ballot_sync"),
        ("not_in_mask", 32, 0, 0xFFFF, r"block 0, thread 16: __syncwarp with a mask that lacks the calling lane"),
        ("past_dynamic", 32, 16, 0, r"block 0: wrote past its dynamic shared memory of 64 bytes"),
        ("atomics", 64, 0, 0, r"block 0: 100000 rounds in which threads only slept"),
        ("misaligned", 32, 4, 0, r"block 0, thread 0: a misaligned 16-byte load"),
    ],
)  # fmt: skip
def test_faults_are_reported_and_the_next_launch_works(name: str, block: int, n: int, mask: int, message: str) -> None:
    for _ in range(2):
        with pytest.raises(ContractError, match=message):
            run(name, 2, block, random(64), n=n, mask=mask, shared_bytes=64)
        values = random(64)
        np.testing.assert_array_equal(run("neighbour", 1, 64, values), np.roll(values, 1))


def test_a_wrong_launch_is_refused() -> None:
    module = load(SOURCE, torch.device("cpu"))
    args = Args(0, 0, 0, 0)
    for grid, block, shared_bytes in ((0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, -1), (1 << 31, 32, 0)):
        with pytest.raises(ContractError, match="grid"):
            module.launch("ballot", grid, block, args, shared_bytes=shared_bytes)
    with pytest.raises(ContractError, match="24 bytes of the kernel's struct"):
        module.launch("ballot", 1, 32, ctypes.c_uint64(0))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"SM120_HOST_EXPORT\(nothing, ARGS\)"):
        module.launch("nothing", 1, 32, args)


def test_the_library_is_cached_and_named_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "kernel.cu"
    source.write_text('#include "common.cuh"\nstruct A { int* x; };\n#ifndef N\n#define N 1\n#endif\n'
                      'extern "C" __global__ void set(const __grid_constant__ A p) { *p.x = N; }\n'
                      "SM120_HOST_EXPORT(set, A)\n")  # fmt: skip
    libraries = tmp_path / "cache" / "sglang-sm120" / "kernels"

    def value(*defines: str) -> int:
        x = ctypes.c_int(0)

        class A(ctypes.Structure):
            _fields_ = (("x", ctypes.c_void_p),)

        host_build.load(source, defines).launch("set", 1, 1, A(ctypes.addressof(x)))
        return x.value

    assert value() == value() == 1
    assert len(list(libraries.iterdir())) == 1
    assert value("N=5") == 5
    source.write_text(source.read_text().replace("*p.x = N", "*p.x = N + 1"))
    assert (value(), len(list(libraries.iterdir()))) == (2, 3)
    monkeypatch.setattr(host_build.ctypes, "CDLL", _fails_once(host_build.ctypes.CDLL))
    assert value() == 2, "a library that cannot be loaded is built again"


def _fails_once(function):
    calls = []

    def wrapped(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError("invalid ELF header")
        return function(path)

    return wrapped


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "kernel.cu"
    source.write_text('#include "common.cuh"\nthis is not C++\n')
    with pytest.raises(ConfigError, match=r"(?s)does not compile for the CPU.*'this' |error"):
        host_build.load(source)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler"):
        host_build.load(source)
    (tmp_path / "common.cuh").write_text("")
    with pytest.raises(ConfigError, match=r"rename common\.cuh"):
        build.headers(source)
