"""`sglang-sm120 tune --comm` from end to end on the CPU: real processes, in which something else measures."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import comm_work
import msgspec
import pytest
import torch
from comm_work import LAMPORT, NCCL, PUSH
from rich.console import Console

from sglang_sm120.bench.ranks import RankFailedError
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.kernels.communication.all_reduce_rmsnorm.config import Range
from sglang_sm120.runners.profile import current_machine
from sglang_sm120.tune import comm, comm_profile
from sglang_sm120.tune.comm_host import Host
from sglang_sm120.tune.comm_options import CommOptions

TWO = Host(None, ("Test GPU", "Test GPU"), "PCIe")


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU also where there are some, but fewer than a test has ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def tune(path: Path | None, measure_with: Any = comm_work.measured, **changes: Any) -> tuple[int, str]:
    """Exit code and what was printed."""
    chosen: dict[str, Any] = {
        "hidden_size": 2048, "rows": (1, 4), "baseline": "module:function", "time_limit_s": 120.0,
        "output": None if path is None else str(path),
    }  # fmt: skip
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    code = comm.run(CommOptions(**(chosen | changes)), console, measure_with=measure_with, host=TWO)
    return code, console.export_text()


def test_a_whole_run(tmp_path: Path) -> None:
    path, picture, page = (tmp_path / name for name in ("profile.json", "comm.png", "comm.md"))
    code, text = tune(path, plot=str(picture), markdown=str(page))
    assert code == 0
    profile = comm_profile.read(path)
    assert profile.machine == current_machine()
    assert (profile.gpus, profile.link, profile.world_size) == (["Test GPU"] * 2, "PCIe", 2)
    assert (profile.hidden_size, profile.dtype, profile.baseline) == (2048, "bfloat16", "module:function")
    assert profile.missing == ["other: not on rank 0", "other: not on rank 1"]
    assert [(point.fused, point.rows, point.bytes) for point in profile.points] == [
        (True, 1, 4096), (True, 4, 16384), (False, 1, 4096), (False, 4, 16384),
    ]  # fmt: skip
    lamport, nccl = profile.points[1].candidates
    assert (lamport.name, nccl.name) == (LAMPORT, NCCL)
    assert lamport.samples_us == [5.0] * 9, "4 us, and 1 more on the slower rank"
    assert profile.ranges(True) == (Range(16384, LAMPORT),)
    assert f"wrote {path}" in text
    assert "up to 16,384 bytes one-shot-lamport" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "**5.00**" in page.read_text()
    assert comm_profile.for_server(path, 2, 2048) == profile


def test_without_a_baseline_it_is_said(tmp_path: Path) -> None:
    code, text = tune(tmp_path / "profile.json", baseline=None, no_baseline="sgl_kernel not installed")
    assert code == 0
    assert "no baseline at all: sgl_kernel not installed" in text
    assert "nothing to choose against" in text
    assert comm_profile.read(tmp_path / "profile.json").baseline == "none"


def test_what_is_wrong_is_named_and_not_chosen(tmp_path: Path) -> None:
    code, text = tune(tmp_path / "profile.json", comm_work.one_is_wrong)
    assert code == 1
    assert f"{LAMPORT}, the sum alone, at 1, 4 tokens: wrong: rank 1: relative error 0.5" in text
    profile = comm_profile.read(tmp_path / "profile.json")
    assert profile.ranges(False) == (Range(16384, PUSH),)
    assert not profile.points[0].candidates[0].samples_us


def test_the_default_output_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, _ = tune(None, rows=())
    assert code == 0
    profile = comm_profile.for_server(None, 2, 2048)
    assert profile is not None
    assert [point.bytes for point in profile.of(True)] == [4096 << n for n in range(14)]


def test_a_profile_of_the_same_is_replaced_and_another_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    old = msgspec.structs.replace(comm_work.canned(), machine=current_machine())
    comm_profile.write(old, path)
    assert tune(path)[0] == 0
    assert comm_profile.read(path) != old
    for other, said in (
        (comm_work.canned(), "gpu Test GPU, here"),
        (msgspec.structs.replace(old, dtype="float16"), "dtype float16, not bfloat16"),
        (None, "profile.json"),
    ):
        comm_profile.write(other, path) if other is not None else path.write_text("{")
        content = path.read_bytes()
        with pytest.raises(ConfigError, match=said) as error:
            tune(path, pytest.fail)
        assert "--force" in error.value.fix
        assert path.read_bytes() == content
    assert tune(path, force=True)[0] == 0


def test_a_path_that_cannot_be_written_is_noticed_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "profile.json"):
        with pytest.raises(ConfigError, match="profile"):
            tune(path, pytest.fail, force=True)


def test_ranks_that_fail_say_why_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(RankFailedError) as error:
        tune(path, comm_work.cannot_share)
    assert "the GPUs of this group cannot share memory: no" in error.value.found
    assert "Traceback" not in error.value.found, "an error of ours says all that there is to say"
    assert "bench p2p" in error.value.fix
    assert not path.exists()


def test_a_rank_that_hangs_is_killed_at_the_limit(tmp_path: Path) -> None:
    path, start = tmp_path / "profile.json", time.monotonic()
    with pytest.raises(RankFailedError) as error:
        tune(path, comm_work.hangs, time_limit_s=20.0)
    assert time.monotonic() - start < 60
    assert "sum, residual add and RMSNorm, 4 tokens: ranks [1] gave no answer within 20 s" in error.value.found
    for advice in ("bench p2p", "--baseline none", "--rows", "--time-limit"):
        assert advice in error.value.fix
    assert not path.exists()
    assert not multiprocessing.active_children()


def test_after_ctrl_c_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it as ignored
    try:
        code, text = tune(path, comm_work.interrupts)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert "interrupted; nothing was written" in text
    assert os.listdir(tmp_path) == []
    assert not multiprocessing.active_children()


def test_without_two_gpus_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match="1 CUDA GPU visible"):
        comm.run(CommOptions(hidden_size=64, output=str(tmp_path / "profile.json")))
    assert os.listdir(tmp_path) == []
