"""`sglang-sm120 doctor`: read the machine, say what is wrong and how to fix it (docs/doctor.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_sm120 import stdout
from sglang_sm120.doctor import output, redact, report
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
        output.require_free(option, path, force=args.force)
    if args.machine and args.probe:
        raise ConfigError("--probe with --machine", "the GPUs themselves, to try them", "drop one of the two")
    if machine is None:
        machine = _recording(args.machine) if args.machine else ThisMachine()
    recorder = Recorder(machine)
    facts = _gather(recorder, args.machine)
    findings = judge(facts)
    if args.probe:
        findings = worst_first([*findings, *probe_findings(facts)])
    if args.json:
        stdout.write(report.to_json(findings))
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
    """A table on a terminal that is wide enough; plain lines into a pipe, or where rich is broken in any way."""
    text = None
    try:
        from rich.console import Console

        console = Console()
        if console.is_terminal and console.width >= report.TABLE_WIDTH:
            with console.capture() as captured:  # so that a table is there as a whole or not at all
                report.show(findings, console, fix_hints=fix_hints)
            text = captured.get()
    except Exception:  # an import error, or a version that lacks what the table needs
        text = None
    stdout.write(report.plain(findings, fix_hints=fix_hints) if text is None else text)


def _gather(machine: Machine, recorded: str | None) -> Facts:
    """recorded: the folder of a recording, whose texts may be of any kind."""
    try:
        return gather(machine)
    except Exception as error:
        if recorded is None:
            raise
        raise _damaged(recorded, f"its texts cannot be read: {type(error).__name__}: {error}") from error


def _recording(folder: str) -> Recording:
    try:
        return Recording(Path(folder))
    except (OSError, ValueError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise _damaged(folder, why) from error


def _damaged(folder: str, why: str) -> ConfigError:
    return ConfigError(f"--machine {folder}: {why}", "a folder that --record wrote", "record it again")


def _write(args: argparse.Namespace, findings: list[Finding], recorder: Recorder) -> None:
    """Redacted, both; the findings too, since they name paths."""
    identity = redact.Identity.of_this_machine()
    parts = recorder.sections()
    if args.report:
        shown = redact.redact_all({"": report.head(findings), **parts}, identity)
        text = report.bug_report(shown.pop(""), shown)
        output.write_file("--report", Path(args.report), text, force=args.force)
        print(f"wrote {args.report}; look it over before you attach it", file=sys.stderr)
    if args.record:
        folder = Path(args.record)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--record {folder}: {error.strerror}", "a folder that can be made", "name another"
            ) from error
        for name, text in redact.redact_all(parts, identity).items():
            output.write_file("--record", folder / name, text, force=args.force)
        print(f"wrote {args.record}", file=sys.stderr)
