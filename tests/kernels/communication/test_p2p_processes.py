"""The probe's own processes: with the kernels on the CPU, and on GPUs where there are two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from communication.p2p_children import HERE, is_gone, until
from sglang_sm120.kernels.communication.p2p_probe import workers
from sglang_sm120.kernels.communication.p2p_probe.api import Sizes, failed, find, probe
from sglang_sm120.kernels.communication.p2p_probe.workers import Fault, Worker, child_command

ROOT = HERE.parents[2]
SMALL = Sizes(data_bytes=64 << 10, message_bytes=2048, rounds=20, hops=50, samples=2, warmup=1, warmup_s=0.0)


@pytest.fixture
def host_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[workers.Command]:
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    before = set(folder.glob("p2p*"))
    monkeypatch.setenv("P2P_TEST_FOLDER", str(folder))
    yield lambda device, sizes: [
        sys.executable, str(HERE / "host_machine.py"), str(device), str(os.getpid()), json.dumps(asdict(sizes))
    ]  # fmt: skip
    for path in set(folder.glob("p2p*")) - before:
        path.unlink()


def test_a_probe_with_the_real_kernels(host_command: workers.Command) -> None:
    """Three processes that share memory, run kernel.cu as built for the host and wait for each other's flags."""
    steps: list[tuple[str, int, int]] = []
    of = probe(range(3), sizes=SMALL, command=host_command, time_limit_s=60, progress=lambda *step: steps.append(step))
    assert [pair.detail for pair in of.pairs] == [""] * 6
    assert {pair.status for pair in of.pairs} == {"ok"}
    assert of.all_to_all.status == "ok", of.all_to_all.detail
    assert of.usable
    for pair in of.pairs:
        assert pair.can_access and pair.opened and pair.push_right and pair.pull_right and pair.messages_right
        assert 0 < pair.pull_latency_us < 1e5 > pair.push_latency_us > 0
        assert min(pair.push_gb_s, pair.pull_gb_s, pair.message_latency_us) > 0
    assert len(of.all_to_all.push_gb_s) == len(of.all_to_all.pull_gb_s) == 3
    assert [gpu.name for gpu in of.gpus] == ["host 0", "host 1", "host 2"]
    assert steps[0] == ("starting a process for each GPU", 0, 5)
    assert [step[0] for step in steps[1:]] == ["GPUs 0 and 1", "GPUs 0 and 2", "GPUs 1 and 2", "all at once"]
    assert not failed(find(of))


def test_a_child_dies_with_its_parent_even_inside_a_kernel(host_command: workers.Command, tmp_path: Path) -> None:
    command = host_command(0, SMALL)
    started = subprocess.Popen(
        [sys.executable, "-c", _PARENT, json.dumps(command), str(tmp_path / "child")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert until(lambda: (tmp_path / "child").exists(), 60)
        child = int((tmp_path / "child").read_text())
        time.sleep(0.3)
        assert not is_gone(child), "it waits for a flag that does not come"
        started.send_signal(signal.SIGKILL)
        started.wait(10)
        assert until(lambda: is_gone(child))
    finally:
        started.kill()
        started.wait(10)


_PARENT = """
import json, os, sys, time
from pathlib import Path
from sglang_sm120.kernels.communication.p2p_probe.workers import Worker
command = json.loads(sys.argv[1])
command[3] = str(os.getpid())
worker = Worker(0, command)
facts = worker.receive(time.monotonic() + 120)
worker.ask(time.monotonic() + 30, "open", peer=0, handle=facts["handle"])
worker.send("ping_pong", peer=0, starts=False, first_flag=5, message_bytes=0, limit_ns=60_000_000_000)
path = Path(sys.argv[2])
path.with_suffix(".new").write_text(str(worker._process.pid))
path.with_suffix(".new").rename(path)
time.sleep(60)
"""


def test_the_command_that_runs_a_child() -> None:
    command = child_command(3, SMALL)
    assert command[:4] == [sys.executable, "-m", "sglang_sm120.kernels.communication.p2p_probe.child", "3"]
    assert Sizes(**json.loads(command[5])) == SMALL
    done = subprocess.run([*command[:4], "1", command[5]], capture_output=True, env=workers._environment(), cwd="/")
    assert (done.returncode, done.stdout) == (1, b""), "its parent is another process: it ends at once"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU starts")
def test_a_child_without_a_gpu_says_why() -> None:
    worker = Worker(0, child_command(0, SMALL))
    try:
        with pytest.raises(Fault, match="GPU 0, start: ") as fault:
            worker.receive(time.monotonic() + 120)
        assert fault.value.status == "failed"
    finally:
        assert worker.kill()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_gpus() -> None:
    of = probe([0, 1])
    assert of.usable, find(of)
    for pair in of.pairs:
        assert 0.1 < pair.push_latency_us < 100 > pair.pull_latency_us > 0.1
        assert pair.push_latency_us < pair.message_latency_us
        assert 0.5 < pair.push_gb_s < 2000 > pair.pull_gb_s > 0.5
    assert min(of.all_to_all.push_gb_s + of.all_to_all.pull_gb_s) > 0.5
    assert all(gpu.name and gpu.pci_bus_id for gpu in of.gpus)
    assert not failed(find(of))
