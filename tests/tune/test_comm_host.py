"""Which GPUs `tune --comm` measures between, refusals, and what connects them, as nvidia-smi says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120.cli import main
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.kernels.communication import ipc
from sglang_sm120.tune import comm_host
from sglang_sm120.tune.comm_host import NVLINK, PCIE, SOME_NVLINK, UNKNOWN, find_host, link_between
from sglang_sm120.tune.comm_options import CommOptions

GIB = 2**30
BUS = ["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:9d:00.0"]
INDICES = "\n".join(f"{i}, 0000{bus_id.upper()}" for i, bus_id in enumerate(BUS)) + "\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Four of them as far as torch and the driver say; to be changed."""
    machine: dict[str, Any] = {"count": 4, "free": [96 * GIB] * 4, "current": None, "topology": topology("PHB")}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: machine["count"])
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (machine["free"][device], 96 * GIB))
    monkeypatch.setattr(cuda, "set_device", lambda device: machine.update(current=device))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(name=f"Test GPU {device}"))
    monkeypatch.setattr(ipc, "pci_bus_id", lambda device: BUS[device])
    monkeypatch.setattr(comm_host, "_nvidia_smi", lambda *args: machine["topology"] if args[0] == "topo" else INDICES)
    return machine


def topology(word: str, **others: str) -> str:
    """As `nvidia-smi topo -m` prints it, colours too; `others` by pair: _0_1="NV4"."""
    names = "\t".join(f"GPU{i}" for i in range(4))
    lines = [f"\t\x1b[4m{names}\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for i in range(4):
        cells = [" X " if i == j else others.get(f"_{min(i, j)}_{max(i, j)}", word) for j in range(4)]
        lines.append("\t".join([f"GPU{i}", *cells, "SYS", "0-31", "0"]))
    lines += ["NIC0\tNV4\tNV4\tNV4\tNV4\t X", "", "Legend:", "", "  X    = Self", "  NV#  = a bonded set of NVLinks"]
    return "\n".join(lines)


def host(**changes: Any) -> comm_host.Host:
    return find_host(CommOptions(**({"hidden_size": 6144} | changes)))


def test_all_gpus_are_taken(gpus: dict[str, Any]) -> None:
    assert host() == comm_host.Host((0, 1, 2, 3), tuple(f"Test GPU {i}" for i in range(4)), PCIE)


def test_some_gpus_are_taken(gpus: dict[str, Any]) -> None:
    assert host(world_size=2).devices == (0, 1)
    gpus["topology"] = topology("SYS", _2_3="NV12")
    assert host(devices=(3, 2)) == comm_host.Host((3, 2), ("Test GPU 3", "Test GPU 2"), NVLINK)
    assert gpus["current"] == 3, "the profile's machine is that of rank 0"


@pytest.mark.parametrize(("count", "found"), [(0, "no CUDA GPUs visible"), (1, "1 CUDA GPU visible")])
def test_fewer_than_two_gpus(count: int, found: str, gpus: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    gpus["count"] = count
    assert main(["tune", "--comm", "--hidden-size", "64", "--baseline", "none"]) == 1
    error = capsys.readouterr().err
    assert found in error
    assert "needed: two or more on one host" in error
    assert "--from-profile FILE" in error
    assert error.count("\n") == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 8}, "devices 0, 1, 2, 3, 4, 5, 6, 7, of 0 to 3"),
        ({"devices": (0, 5)}, "devices 0, 5, of 0 to 3"),
        ({"world_size": 3}, "3 ranks are not covered"),
        ({"devices": (0, 1, 2)}, "3 ranks are not covered"),
        ({"world_size": 1}, "1 ranks are not covered"),
        ({"hidden_size": 100}, "hidden size 100 is not covered"),
        ({"hidden_size": 32768}, "hidden size 32768 is not covered"),
    ],
)
def test_what_is_not_covered(changes: dict[str, Any], said: str, gpus: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as error:
        host(**changes)
    assert said in error.value.found


def test_measuring_beside_a_server_is_refused(gpus: dict[str, Any]) -> None:
    gpus["free"][2] = 16 * GIB
    with pytest.raises(UnsupportedError, match=r"GPU 2: other programs hold 80\.0 GiB of the GPU's 96\.0 GiB"):
        host()
    assert host(devices=(0, 1)).devices == (0, 1)


# ---- what connects them ----
def link(text: str, bus_ids: list[str], indices: str = INDICES) -> str:
    return link_between(bus_ids, lambda *args: text if args == ("topo", "-m") else indices)


@pytest.mark.parametrize("word", ["PIX", "PXB", "PHB", "NODE", "SYS"])
def test_pcie(word: str) -> None:
    assert link(topology(word), BUS) == PCIE


def test_nvlink() -> None:
    assert link(topology("NV18"), BUS) == NVLINK
    some = topology("SYS", _0_1="NV4", _2_3="NV4")
    assert link(some, BUS) == SOME_NVLINK
    assert link(some, BUS[:2]) == NVLINK
    assert link(some, BUS[1:3]) == PCIE


def test_gpus_are_known_by_their_address_and_not_by_their_number() -> None:
    turned = "\n".join(f"{3 - i}, 0000{bus_id}" for i, bus_id in enumerate(BUS))
    some = topology("SYS", _0_1="NV4")
    assert link(some, BUS[:2], turned) == PCIE
    assert link(some, BUS[2:], turned) == NVLINK


def test_what_is_not_known() -> None:
    assert link("", BUS) == UNKNOWN
    assert link(topology("PHB"), BUS, "") == UNKNOWN
    assert link(topology("???"), BUS) == UNKNOWN
    assert link(topology("PHB"), [BUS[0], "0000:ff:00.0"]) == UNKNOWN
    assert link("GPU0\nGPU1\tX", BUS) == UNKNOWN


def test_without_nvidia_smi_or_with_a_broken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert link_between(BUS) == UNKNOWN
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU0 X PHB'; exit 9\n")
    program.chmod(0o755)
    assert link_between(BUS) == UNKNOWN
    program.write_text("not a program")
    assert link_between(BUS) == UNKNOWN
