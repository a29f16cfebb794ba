"""`sglang-sm120 tune --comm`: every all-reduce between the GPUs of this host, into the profile that a server reads.

How: docs/tuning.md.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglang_sm120.bench import plot as bench_plot
from sglang_sm120.bench.all_reduce import FAILED, WRONG, Work, combined, measure
from sglang_sm120.bench.moe import terminal
from sglang_sm120.bench.ranks import RankFailedError, run_ranks
from sglang_sm120.errors import ConfigError
from sglang_sm120.runners.profile import Machine, current_machine
from sglang_sm120.tune import comm_plot, comm_profile
from sglang_sm120.tune import comm_report as report
from sglang_sm120.tune.comm_host import Host, find_host
from sglang_sm120.tune.comm_options import CommOptions, default_rows
from sglang_sm120.tune.comm_profile import CommCandidate, CommPoint, CommProfile
from sglang_sm120.tune.run import INTERRUPTED, require_writable

_ONE_SHOT_BYTES = 4 << 20  # beyond, a rank would send (W - 1) times too much to win anywhere


def run(
    options: CommOptions,
    console: Console | None = None,
    *,
    measure_with: Callable[..., Any] = measure,
    host: Host | None = None,
) -> int:
    """Measure, or read a profile, and report; 1 if a candidate was wrong or failed, 130 after Ctrl-C, else 0.

    Args:
        options: what to measure and which files to write.
        console: None for the terminal.
        measure_with: what each rank does, importable by name; for tests.
        host: None: this one's GPUs; for tests.

    Raises: Sm120Error, with what to do about it: no two idle GPUs; a rank that failed, or hung and was killed; a file
        that cannot be read or written. No profile is written then.
    """
    console = console or terminal()
    if options.plot is not None:
        bench_plot.require_matplotlib()
    if options.from_profile is not None:
        return _report(options, console, comm_profile.read(options.from_profile))
    host = host or find_host(options)
    machine = current_machine()
    world_size = len(host.gpus)
    path = comm_profile.default_path(world_size, machine.gpu)
    path = Path(options.output).expanduser() if options.output else path
    require_writable(path)
    if path.exists() and not options.force:
        _require_replaceable(path, machine, world_size, options)
    work = Work(
        hidden_size=options.hidden_size,
        rows=options.rows or default_rows(options.hidden_size),
        dtype=options.dtype,
        samples=options.repeat,
        baseline=options.baseline,
        max_one_shot_bytes=_ONE_SHOT_BYTES + 2 * options.hidden_size,  # whole rows may come to a little more
    )
    try:
        results = _measure(work, options, console, host, measure_with)
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written", markup=False, highlight=False)
        return INTERRUPTED
    profile = _profile(results, options, host, machine)
    comm_profile.write(profile, path)
    code = _report(options, console, profile)
    console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return code


def _require_replaceable(path: Path, machine: Machine, world_size: int, options: CommOptions) -> None:
    """Raises ConfigError unless the file is an older profile of just what is to be measured."""
    fix = "name another file with --output, or pass --force to replace this one"
    try:
        old = comm_profile.read(path)
    except ConfigError as error:
        raise ConfigError(error.found, error.needed, fix) from error
    reason = old.machine.mismatch(machine) or old.uncovered_reason(world_size, options.hidden_size, options.dtype)
    if reason is not None:
        raise ConfigError(
            f"all-reduce profile {path} is of something else: {reason}", "a file to replace, or a new one", fix
        )


def _measure(
    work: Work, options: CommOptions, console: Console, host: Host, measure_with: Callable[..., Any]
) -> list[dict[str, Any]]:
    """What each rank found."""
    points = work.points
    now = "starting"
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left: about"), TimeRemainingColumn(), console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task(now, total=len(points))

        def done(said: tuple[int, int]) -> None:
            nonlocal now
            number = said[0]
            now = _describe(*points[number]) if number < len(points) else "ending"
            progress.update(task, completed=number, description=now)

        try:
            return run_ranks(
                len(host.gpus),
                measure_with,
                work,
                time_limit_s=options.time_limit_s,
                devices=host.devices,
                on_progress=done,
            )
        except RankFailedError as error:
            raise RankFailedError(f"tune --comm, {now}: {error.found}", error.needed, _FIX) from error


_FIX = (
    "`sglang-sm120 bench p2p` says whether these GPUs reach each other's memory. If they do: --baseline none leaves "
    "SGLang's kernels out, --rows takes fewer sizes, --time-limit waits longer"
)


def _describe(fused: bool, rows: int) -> str:
    return f"{report.TITLES[fused]}, {rows} token{'' if rows == 1 else 's'}"


def _profile(results: Sequence[dict[str, Any]], options: CommOptions, host: Host, machine: Machine) -> CommProfile:
    missing = dict.fromkeys(reason for result in results for reason in result["missing"])
    if options.baseline is None:
        missing = {f"at all: {options.no_baseline}": None}
    return CommProfile(
        format=comm_profile.FORMAT,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["sglang-sm120", *sys.argv[1:]]),
        machine=machine,
        gpus=list(host.gpus),
        link=host.link,
        world_size=len(host.gpus),
        hidden_size=options.hidden_size,
        dtype=options.dtype,
        baseline=options.baseline or "none",
        missing=list(missing),
        points=[
            CommPoint(
                rows=point["rows"],
                bytes=point["bytes"],
                fused=point["fused"],
                candidates=[_candidate(name, how) for name, how in point["candidates"].items()],
            )
            for point in combined(results)
        ],
    )


def _candidate(name: str, how: dict[str, Any]) -> CommCandidate:
    reason = next((f"{kind}: {how[kind]}" for kind in (WRONG, FAILED) if kind in how), "")
    return CommCandidate(name=name, samples_us=how.get("samples_us", []), reason=reason)


def _report(options: CommOptions, console: Console, profile: CommProfile) -> int:
    report.show(console, profile)
    for path, write in ((options.markdown, _write_markdown), (options.plot, comm_plot.draw)):
        if path is None:
            continue
        try:
            write(profile, path)
        except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
            raise ConfigError(f"{path}: {error}", "a file that can be written", "name another") from error
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return 1 if report.failures(profile) else 0


def _write_markdown(profile: CommProfile, path: str) -> None:
    Path(path).write_text(report.markdown(profile), encoding="utf-8")
