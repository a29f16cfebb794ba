"""ACS, IOMMU and forced P2P: what lspci and the files have to show before doctor calls something good or bad."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_machines import HEALTHY, MACHINES, facts_of, of

from sglang_sm120.doctor import facts_pci
from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.machine import Output, Recorder, Recording
from sglang_sm120.doctor.redact import Identity, redact_all
from sglang_sm120.kernels.communication.p2p_probe.environment import config_with_acs

SWITCH = "switch-4-rtx-pro-6000-acs"
BEHIND_SWITCH = [f"0000:{bus}:00.0" for bus in ("83", "84", "85", "86")]
FLAGS = "flags\t\t: fpu vme hypervisor lahf_lm\n"


def lspci(name: str = SWITCH) -> str:
    return (MACHINES / name / "lspci.txt").read_text()


def with_lspci(change: Callable[[str], str], name: str = SWITCH, state: str = "ok", **files: str) -> Facts:
    """A recorded machine whose lspci says something else. files: of /proc, by their names."""

    class Changed(Recording):
        def run(self, name: str) -> Output:
            whole = super().run(name)
            return Output(state, change(whole.text)) if name == "lspci" else whole

        def text(self, path: str) -> str:
            return files.get(path.removeprefix("/proc/")) or super().text(path)

    return gather(Changed(MACHINES / name))


def level(facts: Facts, check: str = "bus.acs") -> str:
    (found,) = of(facts, check)
    return found.level


def redirect(text: str, kind: str, flags: str) -> str:
    """The text with these flags set in the ACS control of every port of a kind, and cleared in all others."""
    blocks = []
    for block in re.split(r"(?<=\n)(?=\d{4}:)", text):
        block = re.sub(r"(ACSCtl:.*)", lambda match: match[1].replace("+", "-"), block)
        if f") {kind}" in block:
            for flag in flags.split():
                block = re.sub(rf"(ACSCtl:.*){flag}-", rf"\1{flag}+", block)
        blocks.append(block)
    return "".join(blocks)


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        ("Downstream Port", "ReqRedir", "warn"),
        ("Downstream Port", "SrcValid CmpltRedir", "warn"),
        ("Downstream Port", "SrcValid UpstreamFwd", "ok"),
        ("Downstream Port", "SrcValid", "ok"),
        ("Upstream Port", "ReqRedir CmpltRedir", "ok"),
        ("Root Port", "SrcValid ReqRedir CmpltRedir UpstreamFwd", "ok"),
    ],
)
def test_only_ports_of_a_switch_between_gpus_matter(kind: str, flags: str, expected: str) -> None:
    assert level(with_lspci(lambda text: redirect(text, kind, flags))) == expected


def test_root_ports_that_redirect_are_no_fault_where_every_gpu_has_its_own() -> None:
    facts = with_lspci(lambda text: redirect(text, "Root Port", "ReqRedir CmpltRedir UpstreamFwd"), HEALTHY)
    (found,) = of(facts, "bus.acs")
    assert found.level == "ok" and "no two of them share one" in found.found


def test_a_port_with_one_gpu_and_no_other_below_its_switch() -> None:
    text = redirect(lspci(), "Downstream Port", "ReqRedir")
    bridges = facts_pci.read_bridges(text, BEHIND_SWITCH[:1])
    assert facts_pci.redirecting(bridges, BEHIND_SWITCH[:1]) == ()
    two = facts_pci.read_bridges(text, BEHIND_SWITCH[:2])
    assert facts_pci.redirecting(two, BEHIND_SWITCH[:2]) == ("0000:82:00.0", "0000:82:01.0")


@pytest.mark.parametrize("odd", ["", "x", "0000:", "0000:zz:00.0", "-1", "\udcff", "0000:85:00.0:1"])
def test_an_address_that_is_none(odd: str) -> None:
    gpus = [*BEHIND_SWITCH, odd]
    assert facts_pci.access(quiet(lspci()), gpus) == "incomplete"
    assert len(facts_pci.redirecting(facts_pci.read_bridges(lspci(), gpus), gpus)) == 4


def quiet(text: str) -> str:
    return redirect(text, "none", "")


def without(pattern: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, "", quiet(text))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: re.sub(r"Capabilities: \[.*?(?=\tKernel)", "Capabilities: <access denied>\n", text, flags=re.S),
         "root alone"),
        (lambda text: re.sub(r"\tCapabilities: \[2a0 v1\](?:.*\n){3}", "\tCapabilities: <access denied>\n", text),
         "root alone"),
        (without(r"\t\tACSCtl:.*\n"), "does not show all"),
        (without(r"\tCapabilities: \[2a0 v1\](?:.*\n){3}"), "does not show all"),
        (without(r"0000:82:01\.0 PCI bridge(?:.+\n)+\n"), "does not show all"),
        (without(r"0000:81:00\.0 PCI bridge(?:.+\n)+\n"), "does not show all"),
        (without(r"0000:80:01\.1 PCI bridge(?:.+\n)+\n"), "does not show all"),
        (without(r"\tBus: primary=82.*\n"), "does not show all"),
        (without(r"(?s).*"), "does not show all"),
        (lambda text: "pcilib: Cannot open /proc/bus/pci\n", "does not show all"),
    ],
)  # fmt: skip
def test_an_incomplete_lspci_is_never_ok(change: Callable[[str], str], why: str) -> None:
    assert level(with_lspci(quiet)) == "ok"
    (found,) = of(with_lspci(change), "bus.acs")
    assert found.level == "note" and found.found.startswith("not known: ") and why in found.found


@pytest.mark.parametrize(("state", "why"), [("hung", "hangs"), ("failed", "failed"), ("missing", "not installed")])
def test_an_lspci_that_did_not_end_well(state: str, why: str) -> None:
    (found,) = of(with_lspci(quiet, state=state), "bus.acs")
    assert found.level == "note" and why in found.found


@pytest.mark.parametrize("name", [SWITCH, HEALTHY])
def test_an_lspci_that_ends_anywhere_is_ok_only_when_all_ports_are_there(name: str) -> None:
    """Cut behind every line, and in the middle of each."""
    whole = quiet(lspci(name))
    gpus = [gpu.bus_id for gpu in facts_of(name).driver.gpus]
    bridges = facts_pci.read_bridges(whole, gpus)
    last = max(whole.index(f"\n{each.bus_id} ") if each.bus_id in whole[20:] else 0 for each in bridges)
    enough = whole.index("\n\n", last) + 2  # behind the block of the last bridge
    assert facts_pci.access(whole, gpus) == "ok"
    ends = [match.end() for match in re.finditer(r"\n", whole)]
    for end in [0, *ends, *(end - 5 for end in ends)]:
        cut = whole[:end]
        if facts_pci.access(cut, gpus) == "ok":
            ports = facts_pci.dividing_ports(facts_pci.chains(facts_pci.read_bridges(cut, gpus), gpus))
            assert all(f"\n{port} " in cut for port in ports)
            shown = {each.bus_id: each for each in facts_pci.read_bridges(cut, gpus)}
            assert all(shown[port].redirects is False for port in ports) and set(shown) == {b.bus_id for b in bridges}
        else:
            assert end < enough, "nothing is missing"


def test_a_switch_port_without_the_capability_does_not_redirect() -> None:
    """Other extended capabilities are shown, so this one is not there."""
    text = re.sub(
        r"\tCapabilities: \[2a0 v1\](?:.*\n){3}", "\tCapabilities: [100 v2] Advanced Error Reporting\n", lspci()
    )
    assert facts_pci.access(text, BEHIND_SWITCH) == "ok"
    assert facts_pci.redirecting(facts_pci.read_bridges(text, BEHIND_SWITCH), BEHIND_SWITCH) == ()


def test_a_recording_has_what_root_read_without_lspci(tmp_path: Path) -> None:
    """The switch's ports redirect, as their configuration spaces say; lspci is not installed."""
    places = {gpu: f"/sys/devices/pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:0{number}.0/{gpu}"
              for number, gpu in enumerate(BEHIND_SWITCH)}  # fmt: skip

    class Root(Recording):
        def run(self, name: str) -> Output:
            return Output("missing") if name == "lspci" else super().run(name)

        def real(self, path: str) -> str:
            return places.get(path.rpartition("/")[2]) or super().real(path)

        def data(self, path: str) -> bytes:
            assert path.endswith("/config")
            space = bytearray(config_with_acs(0x1D if "/0000:82:" in path else 0))
            space[0x108:] = b"\0serial 48-b0-2d"
            return bytes(space)

    recorder = Recorder(Root(MACHINES / SWITCH))
    live = gather(recorder)
    assert level(live) == "warn" and len(live.bus.acs_bridges) == 4
    for name, text in redact_all(recorder.sections(), Identity()).items():
        assert "48-b0" not in text
        (tmp_path / name).write_text(text)
    again = gather(Recording(tmp_path))
    assert again.bus == live.bus and of(again, "bus.acs") == of(live, "bus.acs")


@pytest.mark.parametrize("name", [SWITCH, HEALTHY])
def test_a_virtual_machine_does_not_show_the_hosts_bus(name: str) -> None:
    """Neither an IOMMU that is off there nor one that passes through says anything about the host's."""
    assert level(with_lspci(quiet, name), "bus.iommu") == "ok"
    facts = with_lspci(quiet, name, cpuinfo=f"processor\t: 0\n{FLAGS}\n")
    assert facts.host.virtual
    for check in ("bus.iommu", "bus.acs"):
        (found,) = of(facts, check)
        assert found.level == "note" and "virtual machine" in found.found and found.fix
    assert not of(replace(facts, quick=True), "bus.iommu")


def test_a_guests_own_iommu_that_translates_is_still_named() -> None:
    facts = with_lspci(quiet, "desktop-2-rtx-5090-iommu", cpuinfo=FLAGS)
    assert level(facts, "bus.iommu") == "warn"


@pytest.mark.parametrize(
    ("text", "virtual"),
    [
        (FLAGS, True), ("flags : fpu hypervisor", True), ("flags\t\t: fpu vme\n", False), ("", False),
        ("model name\t: a hypervisor of a kind\nflags\t\t: fpu\n", False), ("flags\t: hypervisor_x\n", False),
    ],
)  # fmt: skip
def test_what_says_that_it_is_a_virtual_machine(text: str, virtual: bool) -> None:
    assert with_lspci(str, cpuinfo=text or "\n").host.virtual is virtual


@pytest.mark.parametrize(
    ("parameters", "levels"),
    [
        ('RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"\n', ["warn"]),
        ('RegistryDwordsPerDevice: "pci=0000:05:00.0;ForceP2P=0x11"\n', ["warn"]),
        ('RegistryDwords: "ForceP2P=0x0"\n', []),
        ('RegistryDwords: ""\nRegistryDwordsPerDevice: ""\n', []),
    ],
)
def test_forced_p2p(parameters: str, levels: list[str]) -> None:
    found = of(with_lspci(str, HEALTHY, **{"driver/nvidia/params": parameters}), "bus.driver-settings")
    assert [each.level for each in found] == levels
    assert all("ForceP2P=0x11" in each.found for each in found)
