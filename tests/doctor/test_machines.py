"""What doctor says about recorded machines, word for word. docs/doctor.md says how to renew the expected texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recorded_machines import HEALTHY, MACHINES, NAMES, Silent, bad, facts_of, said

from sglang_sm120 import cli
from sglang_sm120.doctor.checks import CHECKS, run_checks
from sglang_sm120.doctor.machine import Output, Recording
from sglang_sm120.findings import LEVELS


def test_the_machines_that_were_asked_for_are_there() -> None:
    assert set(NAMES) >= {
        HEALTHY, "switch-4-rtx-pro-6000-acs", "desktop-2-rtx-5090-iommu", "container-without-sys", "no-gpu", "h200",
    }  # fmt: skip


def test_the_page_lists_every_check_and_which_are_quick() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9-]+\.[a-z0-9-]+)` \| (yes|) ?\|", page, re.MULTILINE)
    assert listed == [(check.name, "yes" if check.quick else "") for check in CHECKS]


@pytest.mark.parametrize("name", NAMES)
def test_text(name: str) -> None:
    assert said(name, "--fix-hints") == (MACHINES / name / "expected.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--machine", str(MACHINES / name), "--json"])
    printed = json.loads(capsys.readouterr().out)
    expected = json.loads((MACHINES / name / "expected.json").read_text())
    assert printed.pop("version") and expected.pop("version")  # of this package, which changes
    assert printed == expected
    assert status == printed["exit_status"] == (1 if printed["counts"]["fail"] else 0)
    assert sum(printed["counts"].values()) == len(printed["findings"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (HEALTHY, set()),
        (
            "switch-4-rtx-pro-6000-acs",
            {
                ("warn", "bus.acs"), ("warn", "bus.link"), ("warn", "gpu.power"), ("warn", "gpu.processes"),
                ("warn", "installation.b12x"), ("warn", "installation.duplicates"), ("warn", "profile.profiles"),
            },
        ),
        (
            "desktop-2-rtx-5090-iommu",
            {
                ("fail", "installation.selected"), ("fail", "software.torch"), ("fail", "software.driver-for-torch"),
                ("fail", "software.jit"), ("warn", "all-reduce.environment"), ("fail", "software.ready-code"),
                ("warn", "bus.link"), ("warn", "bus.bar1"), ("warn", "bus.iommu"), ("warn", "bus.p2p"),
                ("warn", "bus.driver-settings"), ("warn", "host.memory"), ("warn", "environment.variables"),
            },
        ),
        (
            "container-without-sys",
            {("warn", "software.jit"), ("warn", "host.shared-memory"), ("warn", "profile.profiles")},
        ),
        ("no-gpu", {("warn", "gpu.kind")}),
        ("h200", {("warn", "gpu.kind")}),
    ],
)  # fmt: skip
def test_what_is_wrong_there_is_what_was_put_there(name: str, expected: set[tuple[str, str]]) -> None:
    """Written by hand from how each machine was made, not from the output."""
    assert bad(facts_of(name)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_has_its_parts(name: str) -> None:
    findings = run_checks(Recording(MACHINES / name))
    names = {check.name for check in CHECKS}
    assert len(names) == len(CHECKS)
    for finding in findings:
        assert finding.found and finding.what and finding.check in names
        if finding.level in ("warn", "fail"):
            assert finding.fix, f"{finding.what} does not say what to do"
    levels = [LEVELS.index(finding.level) for finding in findings]
    assert levels == sorted(levels), "worst first"
    assert not [finding for finding in findings if finding.what.startswith("check ")], "a check failed itself"


@pytest.mark.parametrize("name", NAMES)
def test_a_link_at_rest_is_no_fault(name: str) -> None:
    """Every GPU of these machines that is idle shows generation 1 of 5."""
    idle = [gpu for gpu in facts_of(name).driver.gpus if not gpu.busy]
    assert name in ("no-gpu", "h200") or any(gpu.link_gen == 1 for gpu in idle)
    slow = [f.found for f in run_checks(Recording(MACHINES / name)) if f.what == "PCIe speed"]
    assert not any(f"GPU {gpu.index} " in text for gpu in idle for text in slow)


def test_a_machine_of_which_nothing_can_be_read() -> None:
    findings = run_checks(Silent())
    assert [f.check for f in findings if f.level == "fail"] == [
        "installation.sglang", "installation.entry-point", "software.torch",
    ]  # fmt: skip
    assert not [finding for finding in findings if finding.what.startswith("check ")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.999])
def test_texts_that_end_in_the_middle(name: str, cut: float) -> None:
    class Cut(Recording):
        def run(self, name: str) -> Output:
            whole = super().run(name)
            return Output(whole.state, whole.text[: int(cut * len(whole.text))], whole.code)

        def text(self, path: str) -> str:
            whole = super().text(path)
            return whole[: int(cut * len(whole))]

    findings = run_checks(Cut(MACHINES / name))
    assert not [finding for finding in findings if finding.what.startswith("check ")]
    fine = {finding.check for finding in findings if finding.level == "ok"}
    assert not fine & {"bus.acs", "bus.iommu"} & {check for _, check in bad(facts_of(name))}, (
        "less was read, and it is ok"
    )
