"""`sglang-sm120 doctor`: read the machine, say what is wrong and how to fix it (docs/doctor.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_sm120.doctor import redact, report
from sglang_sm120.doctor.checks import judge
from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.machine import Machine, Recorder, Recording, ThisMachine
from sglang_sm120.errors import ConfigError
from sglang_sm120.findings import Finding, failed, worst_first


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sglang-sm120 doctor`."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--fix-hints", action="store_true", help="what to do also under notes and what is in order")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="also write everything that was read to this file, for a bug report: names, serial numbers, addresses and "
        "private paths are blanked",
    )
    parser.add_argument("--force", action="store_true", help="let --report and --record overwrite what is there")
    parser.add_argument(
        "--probe", action="store_true", help="also try peer-to-peer memory between the GPUs, as `bench p2p` does"
    )
    parser.add_argument(
        "--record", metavar="FOLDER", help="also write the same as a folder, from which --machine reads; blanked too"
    )
    parser.add_argument("--machine", metavar="FOLDER", help="judge a recorded machine instead of this one")


def run(args: argparse.Namespace, machine: Machine | None = None) -> int:
    """Check and report; 1 if a finding says "fail", else 0.

    Args:
        args: as `add_doctor_arguments` parses them.
        machine: None: this one, or the one of --machine.

    Raises:
        ConfigError: a file that cannot be written or is there already; a folder that is no recording; --probe with one.
    """
    for option, path in (("--report", args.report), ("--record", args.record)):
        _require_free(option, path, args.force)
    if args.machine and args.probe:
        raise ConfigError("--probe with --machine", "the GPUs themselves, to try them", "drop one of the two")
    if machine is None:
        machine = _recording(args.machine) if args.machine else ThisMachine()
    recorder = Recorder(machine)
    facts = gather(recorder)
    findings = judge(facts)
    if args.probe:
        findings = worst_first([*findings, *probe_findings(facts)])
    if args.json:
        sys.stdout.write(report.to_json(findings))
    else:
        _show(findings, fix_hints=args.fix_hints)
    if args.report or args.record:
        _write(args, findings, recorder)
    return int(failed(findings))


def probe_findings(facts: Facts, probe: Callable[[], list[Finding]] | None = None) -> list[Finding]:
    """What `bench p2p` finds; one finding where it cannot run. probe: what measures; for tests."""
    if len(facts.driver.gpus) == 1:
        return [Finding("ok", "P2P probe", "one GPU has no peer", check="p2p.probe")]
    try:
        return (probe or _probe)()
    except Exception as error:
        found = f"it could not run: {getattr(error, 'found', None) or f'{type(error).__name__}: {error}'}"
        return [
            Finding("warn", "P2P probe", found, fix=getattr(error, "fix", "sglang-sm120 bench p2p"), check="p2p.probe")
        ]


def _probe() -> list[Finding]:
    from sglang_sm120.kernels.communication.p2p_probe.api import find, probe

    return find(probe())


def _show(findings: list[Finding], *, fix_hints: bool) -> None:
    """A table on a terminal; plain lines into a pipe, or where rich is broken."""
    try:
        from rich.console import Console

        console = Console()
        if console.is_terminal:
            report.show(findings, console, fix_hints=fix_hints)
            return
    except ImportError:
        pass
    sys.stdout.write(report.plain(findings, fix_hints=fix_hints))


def _recording(folder: str) -> Recording:
    try:
        return Recording(Path(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--machine {folder}: {type(error).__name__}: {error}", "a folder that --record wrote", "record it again"
        ) from error


def _require_free(option: str, path: str | None, force: bool) -> None:
    if path is None or force:
        return
    there = Path(path)
    if there.is_dir() and not any(there.iterdir()) and option == "--record":
        return
    if there.exists():
        raise ConfigError(f"{option} {path} is there already", "a new name", "name another, or add --force")


def _write(args: argparse.Namespace, findings: list[Finding], recorder: Recorder) -> None:
    """Redacted, both; the findings too, since they name paths."""
    identity = redact.Identity.of_this_machine()
    parts = recorder.sections()
    try:
        if args.report:
            key = "report"
            text = redact.redact_all({key: report.bug_report(findings, parts)}, identity)[key]
            with open(args.report, "w" if args.force else "x", encoding="utf-8") as file:
                file.write(text)
            print(f"wrote {args.report}; look it over before you attach it", file=sys.stderr)
        if args.record:
            folder = Path(args.record)
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in redact.redact_all(parts, identity).items():
                (folder / name).write_text(text, encoding="utf-8")
            print(f"wrote {args.record}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}", "a path that can be written", "name another"
        ) from error
