"""What a starting server says: the checks that start no process, in well under a second, once, and stopping nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from typing import Any

import pytest
from recorded_machines import MACHINES, NAMES

from sglang_sm120.doctor import quick
from sglang_sm120.doctor.checks import CHECKS, run_checks
from sglang_sm120.doctor.facts import gather
from sglang_sm120.doctor.machine import Output, Recording, ThisMachine


class Quick(Recording):
    """A recorded machine as the launcher sees it: no command has run."""

    def run(self, name: str) -> Output:
        return Output("skipped")


def logged(name: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=quick.logger.name):
        quick.log_problems(Quick(MACHINES / name))
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "subjects"),
    [
        ("turin-8-rtx-pro-6000", []),
        ("switch-4-rtx-pro-6000-acs", ["packages installed twice", "CUTLASS DSL", "b12x"]),
        (
            "desktop-2-rtx-5090-iommu",
            ["SGLANG_PLUGINS", "all-reduce", "BAR1", "IOMMU", "forced P2P", "memory", "CUDA_LAUNCH_BLOCKING"],
        ),
        ("container-without-sys", ["/dev/shm"]),
        ("no-gpu", []),
        ("h200", []),
    ],
)  # fmt: skip
def test_what_is_logged(name: str, subjects: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """By hand: what of each machine's faults is in files, packages and the environment."""
    lines = logged(name, caplog)
    assert sorted(line.split(": ")[1] for line in lines) == sorted(subjects)
    assert all("; fix: " in line and not line.endswith("fix: ") and "\n" not in line for line in lines)


def test_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    for name in ("fork", "posix_spawn", "posix_spawnp", "system", "execv"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(AssertionError):
        subprocess.run(["true"])
    checks = {finding.check for finding in run_checks(quick=True)}
    assert "installation.sglang" in checks


def test_it_takes_well_under_a_second() -> None:
    """The best of three, since other processes share this machine."""
    times = []
    for _ in range(3):
        started = time.monotonic()
        run_checks(quick=True)
        times.append(time.monotonic() - started)
    assert min(times) < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_quick_checks_say_nothing_that_the_whole_does_not(name: str) -> None:
    """Fewer facts, but no other verdict: each that is quick finds the same subject at the same level, or less."""
    whole = {(f.check, f.what, f.level) for f in run_checks(Recording(MACHINES / name))}
    bad = {(f.check, f.what, f.level) for f in run_checks(Quick(MACHINES / name), quick=True)}
    bad = {found for found in bad if found[2] in ("warn", "fail")}
    assert bad <= whole
    assert {check for check, _, _ in bad} <= {check.name for check in CHECKS if check.quick}


def test_a_fault_of_its_own_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ThisMachine):
        def names(self, path: str) -> tuple[str, ...]:
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError):
        gather(Broken({}, quick=True), quick=True)
    with caplog.at_level(logging.INFO, logger=quick.logger.name):
        quick.log_problems(Broken({}, quick=True))
    assert not caplog.records


@pytest.mark.parametrize(("driver", "levels"), [("nvidia", []), ("nouveau", ["fail"]), ("", ["fail"])])
def test_a_module_that_is_not_loaded(driver: str, levels: list[str]) -> None:
    """Some sandboxes show the GPUs bound to NVIDIA's driver without /proc/driver/nvidia."""

    class Hidden(Quick):
        def text(self, path: str) -> str:
            return "" if path.startswith("/proc/driver/nvidia") else super().text(path)

        def real(self, path: str) -> str:
            return f"/sys/bus/pci/drivers/{driver}" if path.endswith("/driver") and driver else ""

    found = run_checks(Hidden(MACHINES / "turin-8-rtx-pro-6000"), quick=True)
    assert [each.level for each in found if each.check == "gpu.driver"] == levels
