"""Findings for people, for scripts, and for a bug report."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_sm120 import __version__
from sglang_sm120.findings import LEVELS, Finding, failed

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = "sglang-sm120 doctor 1"
TABLE_WIDTH = 60
"""Columns of a terminal below which lines are read more easily than a table."""
_STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan", "ok": "green"}


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """For `--json`: format, version, exit_status, counts by level, findings worst first."""
    counts = Counter(finding.level for finding in findings)
    return {
        "format": FORMAT,
        "version": __version__,
        "exit_status": int(failed(findings)),
        "counts": {level: counts[level] for level in LEVELS},
        "findings": [
            {
                "check": each.check,
                "level": each.level,
                "what": each.what,
                "found": each.found,
                "needed": each.needed,
                "fix": each.fix.splitlines(),
            }
            for each in findings
        ],
    }


def to_json(findings: Sequence[Finding]) -> str:
    return json.dumps(as_dict(findings), indent=1) + "\n"


def summary(findings: Sequence[Finding]) -> str:
    """ "14 findings: 1 fail, 2 warn, 3 note, 8 ok"."""
    counts = Counter(finding.level for finding in findings)
    parts = [f"{counts[level]} {level}" for level in LEVELS if counts[level]]
    return f"{len(findings)} findings: {', '.join(parts)}" if findings else "no findings"


def _rows(finding: Finding, fix_hints: bool) -> list[str]:
    """What stands under a finding: what is needed, and how to get there."""
    if not fix_hints and finding.level not in ("fail", "warn"):
        return []
    rows = [f"needed: {finding.needed}"] if finding.needed else []
    return rows + [f"fix: {step}" for step in finding.fix.splitlines()]


def plain(findings: Sequence[Finding], *, fix_hints: bool) -> str:
    """Lines of any length, for a pipe, a narrow terminal, and where rich is missing."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.what}: {finding.found}")
        lines += [f"      {row}" for row in _rows(finding, fix_hints)]
    return "\n".join([*lines, summary(findings)]) + "\n"


def show(findings: Sequence[Finding], console: Console, *, fix_hints: bool) -> None:
    """A table, worst first.

    Args:
        fix_hints: what is needed and how to get there under every finding; else under "fail" and "warn" only.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("", "about", "found", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap = True
    table.columns[1].max_width = 24
    table.columns[1].overflow = table.columns[2].overflow = "fold"  # else a long word loses its end
    for finding in findings:
        style = _STYLES[finding.level]
        text = Text(finding.found)
        for row in _rows(finding, fix_hints):
            text.append(f"\n{row}", style="dim" if row.startswith("needed") else "")
        table.add_row(Text(finding.level, style=style), Text(finding.what, style=style), text)
    console.print(table)
    console.print(summary(findings), highlight=False)


def head(findings: Sequence[Finding]) -> str:
    """What a bug report begins with: versions and findings, still to be redacted."""
    versions = f"sglang-sm120 {__version__} doctor, Python {platform.python_version()}, {platform.platform()}"
    return f"{versions}\n\n{plain(findings, fix_hints=True)}"


def bug_report(head: str, parts: dict[str, str]) -> str:
    """Findings, then every text that they were made from; all of it redacted.

    Args:
        parts: name -> text, as a recording has them.
    """
    return "\n".join([head, *(f"----- {name} -----\n{text.rstrip()}\n" for name, text in sorted(parts.items()))])
