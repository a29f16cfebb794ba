"""What a probe says about recorded numbers, and the facts about a machine that it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from communication.p2p_reports import GENERATION_5, narrow, report
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import Finding, failed
from sglang_sm120.kernels.communication.p2p_probe.environment import (
    Environment,
    dividing_ports,
    forces_p2p,
    read_environment,
    read_link,
)
from sglang_sm120.kernels.communication.p2p_probe.findings import find
from sglang_sm120.kernels.communication.p2p_probe.report import AllToAll, ProbeReport

ROOT = Path(__file__).resolve().parents[3]
GPUS = ("0000:01:00.0", "0000:41:00.0")


def said(of: ProbeReport) -> dict[str, Finding]:
    """Findings by what they are about; each once."""
    findings = find(of)
    assert len({finding.what for finding in findings}) == len(findings)
    return {finding.what: finding for finding in findings}


def levels(of: ProbeReport) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in find(of)]


@pytest.mark.parametrize("count", [2, 8])
def test_a_healthy_machine_has_one_finding(count: int) -> None:
    of = report(count)
    assert levels(of) == [("ok", "P2P")]
    assert said(of)["P2P"].found == (
        f"right between all {count} GPUs: push 54.0 GB/s, 0.45 us; pull 51.0 GB/s, 1.10 us"
    )
    assert of.usable


def test_numbers_far_above_pcie_are_nvlink() -> None:
    of = report(push_gb_s=370.0, pull_gb_s=340.0, push_latency_us=0.9, together=(360.0, 330.0))
    assert levels(of) == [("ok", "P2P"), ("ok", "NVLink")]
    assert "GPUs 0-1: 370 GB/s" in said(of)["NVLink"].found
    assert levels(report(push_gb_s=65.0, link_gb_s=None))[-1] == ("ok", "P2P")
    assert levels(report(push_gb_s=75.0, link_gb_s=None))[-1] == ("ok", "NVLink")


def test_writes_that_collapse_on_a_pair() -> None:
    """As reported behind a PCIe switch: 2.7 GB/s written, 53 read."""
    of = report(4, lambda s, t: {"push_gb_s": 2.7} if (s, t) == (0, 2) else {}, pull_gb_s=53.0, together=(40.0, 40.0))
    found = said(of)["writes collapse"]
    assert found.level == "warn"
    assert found.found.startswith("GPUs 0-2: 2.7 GB/s pushed, 53.0 GB/s pulled")
    assert "pull" in found.fix
    assert not failed(find(of))


def test_writes_that_collapse_when_all_push() -> None:
    """As reported of 8 GPUs behind two switches: 37 GB/s alone, 2.7 together, reads unharmed."""
    of = report(8, push_gb_s=36.8, pull_gb_s=53.0, together=(2.7, 47.0))
    assert levels(of) == [("warn", "writes collapse together"), ("ok", "P2P")]
    found = said(of)["writes collapse together"].found
    assert found == ("2.7 GB/s a GPU pushed when all push at once, 36.8 when one does; 47.0 GB/s a GPU pulled at once")


def test_a_link_that_all_share_is_no_collapse() -> None:
    assert levels(report(8, together=(12.0, 12.5)))[0] == ("warn", "shared link")
    assert levels(report(8, together=(13.6, 12.5))) == [("ok", "P2P")], "a quarter of 54 is 13.5"


def test_slow_reads() -> None:
    """As reported of a desktop without switches: tiny reads 4 to 16 times slower than writes."""
    of = report(3, pull_latency_us=7.2)
    assert levels(of) == [("note", "slow reads"), ("ok", "P2P")]
    assert "GPUs 0-1, 0-2, 1-2: a read takes 7.20 us, a write 0.45 us (16 times)" in said(of)["slow reads"].found
    assert levels(report(3, pull_latency_us=1.79)) == [("ok", "P2P")], "just below 4 times"


def test_traffic_through_the_host() -> None:
    forced = Environment(driver_parameters=("RegistryDwords: ForceP2P=0x11",), force_p2p=True, iommus=("dmar0",))
    numbers: dict[str, Any] = {"push_gb_s": 11.0, "pull_gb_s": 9.0, "push_latency_us": 14.0, "pull_latency_us": 20.0}
    of = report(4, **numbers, together=(10.0, 9.0), environment=forced)
    found = said(of)["through the host"]
    assert found.level == "warn"
    assert "no pair has more than 11.0 GB/s (17 % of its PCIe link)" in found.found
    assert "ForceP2P" in found.fix.splitlines()[0]
    assert "forced P2P" in said(of)
    # one cause is not enough: a slow link alone, or slow flags alone
    assert "through the host" not in said(report(4, **{**numbers, "push_latency_us": 1.0}, together=None))
    assert "through the host" not in said(report(4, push_latency_us=14.0, pull_latency_us=20.0))
    # nor is one slow pair of several
    one = report(4, lambda s, t: numbers if {s, t} == {0, 3} else {})
    assert "through the host" not in said(one)


def test_no_peer_access() -> None:
    of = report(3, lambda s, t: {"status": "denied", "can_access": False} if 2 in (s, t) else {},
                together=None, environment=Environment(small_bar1=("0000:01:00.0: 256 MiB",)))  # fmt: skip
    assert levels(of) == [("fail", "peer access")]
    found = said(of)["peer access"]
    assert found.found == "the driver gives none between GPUs 0-2, 1-2"
    assert "256 MiB" in found.fix.splitlines()[0]
    assert "--disable-custom-all-reduce" in found.fix
    assert not of.usable


def test_a_hang_says_what_to_change() -> None:
    hung = {"status": "hung", "detail": "flags that GPUs 0 and 1 write to each other do not arrive"}
    plain = said(report(2, **hung, together=None))["P2P hangs"]
    assert plain.level == "fail"
    assert plain.found.startswith("GPUs 0-1: what one GPU sends does not arrive at the other (flags that")
    steps = plain.fix.splitlines()
    assert steps[0].startswith("where the IOMMU is on: iommu=pt")
    assert "setpci -s PORT ECAP_ACS+6.w=0000" in steps[1]
    assert any("dmesg" in step for step in steps)
    assert "NCCL_P2P_DISABLE=1" in steps[-1]
    known = Environment(
        gpu_iommu_types=("0000:01:00.0: DMA-FQ",), acs_bridges=("0000:00:01.1", "0000:40:01.1"), force_p2p=True,
        driver_parameters=("RegistryDwords: RMForceP2PType=1",), uvm_disable_hmm=False,
    )  # fmt: skip
    steps = said(report(2, **hung, together=None, environment=known))["P2P hangs"].fix.splitlines()
    assert steps[0].startswith("the IOMMU translates these GPUs' traffic")
    assert "setpci -s 0000:00:01.1 ECAP_ACS+6.w=0000; setpci -s 0000:40:01.1" in steps[1]
    assert "ForceP2P" in steps[2]
    assert "uvm_disable_hmm=1" in steps[3]
    passthrough = Environment(gpu_iommu_types=("0000:01:00.0: identity",))
    steps = said(report(2, **hung, together=None, environment=passthrough))["P2P hangs"].fix.splitlines()
    assert "iommu=pt" not in steps[0], "it is off already"


@pytest.mark.parametrize(
    ("status", "what"), [("wrong", "wrong data"), ("crashed", "P2P crashes"), ("failed", "P2P fails")]
)
def test_other_faults(status: str, what: str) -> None:
    of = report(3, lambda s, t: {"status": status, "detail": "because"} if {s, t} == {0, 2} else {}, together=None)
    assert levels(of) == [("fail", what)]
    assert said(of)[what].found.startswith("GPUs 0-2: ")
    assert "(because)" in said(of)[what].found
    together = report(3, together=AllToAll(status, "all of it", (1.0,) * 3))
    assert levels(together)[0] == ("fail", what)
    assert "all GPUs at once" in said(together)[what].found
    assert not together.usable


def test_uneven_directions_and_narrow_slots() -> None:
    slow = {"push_gb_s": 27.0, "pull_gb_s": 25.0}
    of = report(3, lambda s, t: {**slow, "push_gb_s": 13.0} if t == 2 else slow if s == 2 else {}, together=None)
    of = narrow(of, 2, 8)
    assert levels(of) == [("note", "uneven directions"), ("note", "PCIe lanes"), ("ok", "P2P")]
    assert "GPUs 0-2, 1-2: GPU 2 moves up to 2.1 times" in said(of)["uneven directions"].found
    assert "GPU 2 8 of 16" in said(of)["PCIe lanes"].found


def test_notes_on_settings_only_where_nothing_is_wrong() -> None:
    translating = Environment(gpu_iommu_types=("0000:01:00.0: DMA",))
    assert levels(report(environment=translating)) == [("note", "IOMMU"), ("ok", "P2P")]
    assert levels(report(environment=translating, status="hung", together=None)) == [("fail", "P2P hangs")]
    assert levels(report(12, together=AllToAll("skipped", "more than 9 GPUs")))[0] == ("note", "all GPUs at once")


def test_many_pairs_are_not_all_named() -> None:
    assert "and 22 more pairs" in said(report(8, status="denied", together=None))["peer access"].found


def test_a_report_survives_json() -> None:
    of = report(3, environment=Environment(iommus=("dmar0",), uvm_disable_hmm=True))
    assert ProbeReport.from_dict(json.loads(json.dumps(of.to_dict()))) == of
    assert of.pair(2, 0).source == 2
    with pytest.raises(KeyError):
        of.pair(0, 0)
    for broken in ({}, {**of.to_dict(), "pairs": [{"what": 1}]}, {**of.to_dict(), "gpus": None}):
        with pytest.raises(ConfigError, match="not a report"):
            ProbeReport.from_dict(broken)


ROOT_PORT, SWITCH, PORTS = "0000:00:01.1", "0000:01:00.0", ("0000:02:00.0", "0000:02:01.0")


def machine(
    root: Path, *, readable_config: bool = True, switch: bool = True, controls: Sequence[int] = (0x1D, 1)
) -> Path:
    """A file system with two GPUs: below two ports of one switch, or each below a root port of its own.

    controls: the ACS control registers of the two ports. Everything else redirects.
    """

    def put(path: str, content: str | bytes) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())

    def config(control: int) -> bytes:
        space = bytearray(4096)
        space[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")  # another capability first
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
        return bytes(space) if readable_config else bytes(space[:64])

    put("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda quiet intel_iommu=on iommu.strict=0 pci=noaer secret=1")
    put("proc/driver/nvidia/params", 'ModifyDeviceFiles: 1\nRegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"\n'
        "EnableResizableBar: 0\nRegistryDwordsPerDevice: \"\"\n")  # fmt: skip
    put("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    (root / "sys/class/iommu/dmar1").mkdir(parents=True)
    (root / "sys/class/iommu/dmar0").mkdir()
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for gpu, port, control, bar1 in zip(GPUS, PORTS, controls, (256 << 20, 96 << 30), strict=True):
        above = f"{ROOT_PORT}/{SWITCH}/{port}" if switch else f"0000:{port[5:7]}:0{PORTS.index(port) + 1}.1"
        folder = f"sys/devices/pci0000:00/{above}/{gpu}"
        put(
            f"{folder}/resource", f"0xf0000000 0xf0ffffff 0x40200\n0x4000000000 {0x4000000000 + bar1 - 1:#x} 0x14220c\n"
        )
        put(f"{folder}/iommu_group/type", "DMA-FQ\n" if bar1 < 1 << 30 else "identity\n")
        put(f"{folder}/current_link_speed", "32.0 GT/s PCIe\n")
        put(f"{folder}/current_link_width", "8\n")
        put(f"{folder}/max_link_width", "16\n")
        put(f"{folder}/../config", config(control))
        os.symlink(root / folder, root / "sys/bus/pci/devices" / gpu)
    for bridge in (ROOT_PORT, f"{ROOT_PORT}/{SWITCH}") if switch else ():
        put(f"sys/devices/pci0000:00/{bridge}/config", config(0x1D))
    return root


def test_the_facts_of_a_machine(tmp_path: Path) -> None:
    found = read_environment(GPUS, machine(tmp_path))
    assert found.iommu_arguments == ("intel_iommu=on", "iommu.strict=0", "pci=noaer")
    assert found.iommus == ("dmar0", "dmar1")
    assert found.gpu_iommu_types == ("0000:01:00.0: DMA-FQ", "0000:41:00.0: identity")
    assert found.iommu_translates is True
    assert found.acs_bridges == (PORTS[0],), "neither the root port nor the switch's upstream port"
    assert found.small_bar1 == ("0000:01:00.0: 256 MiB",)
    assert found.driver_parameters == ("RegistryDwords: ForceP2P=0x11;RMForceP2PType=1", "EnableResizableBar: 0")
    assert found.force_p2p
    assert found.uvm_disable_hmm is False
    assert len(found.lines()) == len(fields(found)) - 1, "force_p2p is in the driver's parameters"
    assert not any("secret" in line for line in found.lines())


def test_acs_matters_where_gpus_share_a_switch(tmp_path: Path) -> None:
    roots = machine(tmp_path / "roots", switch=False, controls=(0x1D, 0x1D))
    assert read_environment(GPUS, roots).acs_bridges == (), "root ports alone"
    both = machine(tmp_path / "both", controls=(0x04, 0x08))
    assert read_environment(GPUS, both).acs_bridges == PORTS
    assert read_environment(GPUS[:1], both).acs_bridges == (), "one GPU has no peer"
    forwarding = machine(tmp_path / "forwarding", controls=(0x11, 0x10))
    assert read_environment(GPUS, forwarding).acs_bridges == (), "upstream forwarding alone"


def test_where_the_ways_between_devices_part() -> None:
    """Two switches in a row: the ports of the outer one matter between a and c, those of the inner between a and b."""
    chains = {"a": ("i0", "iu", "o0", "ou", "r0"), "b": ("i1", "iu", "o0", "ou", "r0"), "c": ("o1", "ou", "r0"),
              "d": ("s0", "su", "r1")}  # fmt: skip
    assert set(dividing_ports(chains)) == {"i0", "i1", "o0", "o1"}
    assert set(dividing_ports({name: chains[name] for name in "ab"})) == {"i0", "i1"}
    assert dividing_ports({name: chains[name] for name in "ad"}) == ()
    assert dividing_ports({"a": (), "b": ()}) == () == dividing_ports({})


@pytest.mark.parametrize(
    ("parameter", "forced"),
    [
        ("RegistryDwords: ForceP2P=0x11", True),
        ("RegistryDwords: ForceP2P=17;PeerMappingOverride=1", True),
        ("RegistryDwords: PeerMappingOverride=1; RMForceP2P = 0x1", True),
        ("RegistryDwords: ForceP2P=0x0", False),
        ("RegistryDwords: ForceP2P=0", False),
        ("RegistryDwords: ForceP2P=0x0;RMForceP2PType=2", True),
        ("RegistryDwords: ForceP2P=0x11;ForceP2P=0x0", False),
        ("RegistryDwords: RMForceP2PType=0", False),
        ("RegistryDwords: ForceP2P=odd", True),
        ("RegistryDwordsPerDevice: pci=0000:01:00.0;ForceP2P=0x11", True),
        ("RegistryDwordsPerDevice: pci=0000:01:00.0;ForceP2P=0x0;pci=0000:02:00.0;ForceP2P=0x11;", True),
        ("RegistryDwordsPerDevice: pci=0000:01:00.0;ForceP2P=0x11;pci=0000:02:00.0;ForceP2P=0x0;", True),
        ("RegistryDwordsPerDevice: pci=0000:01:00.0;ForceP2P=0x0", False),
        ("EnableResizableBar: 0", False),
        ("GrdmaPciTopoCheckOverride: ForceP2P=0x11", False),
    ],
)
def test_keys_that_force_p2p(parameter: str, forced: bool, tmp_path: Path) -> None:
    assert forces_p2p(parameter) is forced
    name, _, value = parameter.partition(": ")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/params").write_text(f'{name}: "{value}"\n')
    assert read_environment(root=tmp_path).force_p2p is forced


def test_facts_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert read_environment(GPUS, tmp_path) == Environment()
    assert Environment().lines() == []
    assert Environment().iommu_translates is None
    assert read_environment(GPUS, machine(tmp_path, readable_config=False)).acs_bridges == ()
    assert read_environment(["0000:99:00.0"], tmp_path).gpu_iommu_types == ()
    assert isinstance(read_environment(), Environment), "of this machine, whatever it is"


def test_the_rate_of_a_link(tmp_path: Path) -> None:
    machine(tmp_path)
    assert read_link(GPUS[0], tmp_path) == (pytest.approx(GENERATION_5 / 2), 8, 16)
    assert read_link("0000:99:00.0", tmp_path) == (None, None, None)
    folder = (tmp_path / "sys/bus/pci/devices" / GPUS[0]).resolve()
    (folder / "current_link_speed").write_text("2.5 GT/s PCIe\n")
    assert read_link(GPUS[0], tmp_path)[0] == pytest.approx(2.0)
    (folder / "current_link_speed").write_text("Unknown\n")
    assert read_link(GPUS[0], tmp_path) == (None, 8, 16)


@pytest.mark.parametrize("module", ["findings", "report", "environment", "remedies", "workers"])
def test_what_needs_no_gpu_needs_no_torch_either(module: str) -> None:
    code = "import sys, importlib; sys.path.insert(0, sys.argv[1]); "
    code += "importlib.import_module('sglang_sm120.kernels.communication.p2p_probe.' + sys.argv[2]); "
    code += "print({'torch', 'numpy', 'cuda'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT), module], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_findings_carry_a_name_for_scripts() -> None:
    assert said(report())["P2P"].check == "p2p.p2p"
    assert said(report(status="hung", together=None))["P2P hangs"].check == "p2p.p2p-hangs"
