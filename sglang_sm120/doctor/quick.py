"""What a starting server says about its machine: the checks that start no process, in its log."""

from __future__ import annotations

import logging
import time

from sglang_sm120.doctor.checks import run_checks
from sglang_sm120.doctor.machine import Machine

logger = logging.getLogger(__name__)


def log_problems(machine: Machine | None = None) -> None:
    """Log what is "warn" or "fail", a line each with its first fix. Never raises: it must not stop a server.

    Args:
        machine: None for this one, read without starting a process.
    """
    started = time.monotonic()
    try:
        findings = run_checks(machine, quick=True)
    except Exception as error:
        logger.debug("sglang-sm120 doctor: %s: %s", type(error).__name__, error)
        return
    for finding in findings:
        if finding.level in ("fail", "warn"):
            fix = (finding.fix or finding.needed).partition("\n")[0]
            logger.warning("sglang-sm120 doctor: %s: %s; fix: %s", finding.what, finding.found, fix)
    logger.debug("sglang-sm120 doctor: %d findings in %.2f s", len(findings), time.monotonic() - started)
