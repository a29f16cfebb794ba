"""Everything that doctor checks, in the order in which a user would want to fix it; standard library only."""

from __future__ import annotations

from sglang_sm120.doctor import (
    checks_bus,
    checks_code,
    checks_driver,
    checks_gpu,
    checks_host,
    checks_installation,
    checks_software,
    checks_visible,
)
from sglang_sm120.doctor.check import Check
from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.facts_python import sglang_tree
from sglang_sm120.doctor.machine import Machine, ThisMachine
from sglang_sm120.findings import Finding, worst_first

__all__ = ["CHECKS", "run_checks", "sglang_tree"]

CHECKS: tuple[Check, ...] = (
    *checks_installation.CHECKS,
    *checks_driver.CHECKS,
    *checks_gpu.CHECKS,
    *checks_software.CHECKS,
    *checks_code.CHECKS,
    *checks_bus.CHECKS,
    *checks_visible.CHECKS,
    *checks_host.CHECKS,
)


def run_checks(machine: Machine | None = None, *, quick: bool = False) -> list[Finding]:
    """Every check's findings, worst first.

    Args:
        machine: None for this one.
        quick: only the checks that need no process, in well under a second.
    """
    if machine is None:
        machine = ThisMachine(quick=quick)
    return judge(gather(machine, quick=quick))


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, worst first. Pure."""
    return worst_first(finding for check in CHECKS if check.quick or not facts.quick for finding in check.run(facts))
