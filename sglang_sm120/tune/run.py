"""`sglang-sm120 tune`: every runner that covers a layer, timed on this machine, into the profile that a server reads.

How: docs/tuning.md. The profile is written after every point, so that what was measured is never lost.
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglang_sm120.bench import plot as bench_plot
from sglang_sm120.bench.moe import terminal
from sglang_sm120.bench.moe_cases import random_weights
from sglang_sm120.bench.timing import GraphTimer, Timer, machine_facts, require_gpu
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.runners import profile as profiles
from sglang_sm120.runners.profile import Layer, Machine, Point, Profile, Shape
from sglang_sm120.runners.registry import RUNNERS
from sglang_sm120.tune import plot, report
from sglang_sm120.tune.measure import LayerBench, choices, layer_spec, measure_point, uncovered_reason
from sglang_sm120.tune.options import LayerCase, TuneOptions

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell has it."""

_DESKTOP_BYTES = 4 * 2**30
_HOST_L2_BYTES = 1 << 17  # of tests on the CPU: a short cycle will do
_TOKENS_OF_TWICE = 1024  # a point of so many tokens takes about twice as long as one of few; for the progress bar


def run(options: TuneOptions, console: Console | None = None, timer: Timer | None = None) -> int:
    """Measure, or read a profile, and report; 1 if a candidate was wrong or failed, 130 after Ctrl-C, else 0.

    Args:
        timer: for tests: measures on the CPU with this clock.

    Raises: Sm120Error, with what to do about it. Points measured until then are in the profile.
    """
    console = console or terminal()
    if options.plot is not None:
        bench_plot.require_matplotlib()
    if options.from_profile is not None:
        profile = _read(Path(options.from_profile))
        return _report(options, console, profile, profile.layers)
    unknown = [name for name in options.runners or () if name not in RUNNERS]
    if unknown:
        raise ConfigError(f"--runners {unknown[0]}", f"some of {', '.join(RUNNERS)}", "name those that you want")
    device, l2_bytes = torch.device("cpu"), _HOST_L2_BYTES
    if timer is None:
        device, timer = require_gpu("--from-profile"), GraphTimer()
        l2_bytes = machine_facts()["l2_bytes"]
    if options.dry_run:
        _list_candidates(options, console, device)
        return 0
    if device.type == "cuda":
        require_idle(*torch.cuda.mem_get_info(device))
    machine = profiles.current_machine()
    path = Path(options.output).expanduser() if options.output else profiles.default_path(machine.gpu)
    profile = opened(path, machine, force=options.force)
    measured: dict[Shape, None] = {}
    console.print(report.machine_line(machine), markup=False, highlight=False)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left: about"), TimeRemainingColumn(), console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(options.layers) * sum(map(_cost, options.tokens)))
        try:
            for case in options.layers:
                progress.update(task, description=f"{case.shape.name}: weights")
                bench = LayerBench(case, options, device, l2_bytes)
                for tokens in options.tokens:
                    doing = f"{case.shape.name}, {_tokens(tokens)}: "
                    point = measure_point(
                        bench, tokens, timer, lambda what, doing=doing: progress.update(task, description=doing + what)
                    )
                    profile = merged(profile, bench.shape, point)
                    profiles.write(profile, path)
                    measured[bench.shape] = None
                    progress.advance(task, _cost(tokens))
                    progress.console.print(doing + _best(point), markup=False, highlight=False)
                _say_warm(console, bench)
                del bench
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        except KeyboardInterrupt:
            progress.stop()
            said = f"what was measured is in {path}" if measured else "nothing was measured"
            console.print(f"interrupted; {said}", markup=False, highlight=False)
            return INTERRUPTED
    layers = [layer for shape in measured if (layer := profile.layer(shape)) is not None]
    code = _report(options, console, profile, layers)
    console.print(f"wrote {path}", markup=False, highlight=False)
    return code


def require_idle(free_bytes: int, total_bytes: int) -> None:
    """Times beside a running server mean nothing, and its memory is short: called before we take any ourselves.

    Raises: UnsupportedError where others hold more than a desktop does.
    """
    held = total_bytes - free_bytes
    if held > _DESKTOP_BYTES:
        raise UnsupportedError(
            f"other programs hold {held / 2**30:.1f} GiB of the GPU's {total_bytes / 2**30:.1f} GiB: a server, perhaps",
            f"a GPU that nothing else uses (a desktop's {_DESKTOP_BYTES / 2**30:.0f} GiB are taken for idle)",
            "stop the server and tune then; nvidia-smi lists what runs",
        )


def opened(path: Path, machine: Machine, *, force: bool = False) -> Profile:
    """The profile at `path` to be added to, or a new one. Nothing is written yet.

    Raises: ConfigError: the path cannot be written; or without `force`, the file is not a profile of this machine.
    """
    require_writable(path)
    layers: list[Layer] = []
    if path.exists() and not force:
        old = _read(path, "name another file with --output, or pass --force to replace this one")
        mismatch = old.machine.mismatch(machine)
        if mismatch is not None:
            raise ConfigError(
                f"profile {path} is of another machine or other versions: {mismatch}",
                "a profile of this machine, to add to",
                "name another file with --output, or pass --force to replace this one",
            )
        layers = old.layers
    return Profile(
        format=profiles.FORMAT,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["sglang-sm120", *sys.argv[1:]]),
        machine=machine,
        layers=layers,
    )


def require_writable(path: Path) -> None:
    """Raises ConfigError, before anything is measured, where a profile cannot be written."""
    part = path.with_name(path.name + ".part")  # as profile.write has it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(None, "is a folder")
        part.touch()
        part.unlink()
    except OSError as error:
        raise ConfigError(
            f"profile {path}: {error.strerror or error}", "a file that can be written", "name another with --output"
        ) from error


def merged(profile: Profile, shape: Shape, point: Point) -> Profile:
    """With one more point, which replaces an older one of the same layer and token count. The rest is kept."""
    old = profile.layer(shape)
    points = [point, *(other for other in (old.points if old else []) if other.tokens != point.tokens)]
    layer = Layer(shape=shape, points=sorted(points, key=lambda point: point.tokens))
    layers = [layer if other.shape == shape else other for other in profile.layers]
    if old is None:
        layers.append(layer)
    return msgspec.structs.replace(profile, layers=layers)


def _read(path: Path, fix: str = "name a file that `sglang-sm120 tune` wrote") -> Profile:
    try:
        return profiles.read(path)
    except ConfigError as error:
        raise ConfigError(error.found, error.needed, fix) from error


def _report(options: TuneOptions, console: Console, profile: Profile, layers: list[Layer]) -> int:
    report.show(console, profile, layers)
    if options.plot is not None:
        plot.draw(profile, layers, options.plot)
        console.print(f"wrote {options.plot}", markup=False, highlight=False)
    return 1 if report.failures(layers) else 0


def _list_candidates(options: TuneOptions, console: Console, device: torch.device) -> None:
    for case in options.layers:
        console.print(f"{case.shape.name}: {_sizes(case)}", style="bold", markup=False, highlight=False)
        weights = random_weights(case.shape, device, torch.Generator(device).manual_seed(options.seed))
        for choice in choices(options.numerics, options.runners):
            reasons: dict[str | None, list[int]] = {}
            for tokens in options.tokens:
                reasons.setdefault(uncovered_reason(choice, weights, layer_spec(case), tokens), []).append(tokens)
            for reason, at in reasons.items():
                where = "at every count" if len(reasons) == 1 else f"at {', '.join(map(str, at))} tokens"
                said = f"covers it {where}" if reason is None else f"does not {where}: {reason}"
                console.print(f"  {choice!s:24} {said}", markup=False, highlight=False)


def _sizes(case: LayerCase) -> str:
    shape = case.shape
    ranks = f" of {case.num_global_experts}" if case.num_global_experts is not None else ""
    return (
        f"{shape.num_experts}{ranks} experts, top {shape.top_k}, hidden size {shape.hidden_size}, intermediate size "
        f"{shape.intermediate_size}"
    )


def _best(point: Point) -> str:
    timed = [(c.median_us, str(c.choice)) for c in point.candidates if c.median_us is not None]
    failed = [str(c.choice) for c in point.candidates if c.failed]
    best = "{1} {0:.1f} us".format(*min(timed)) if timed else "nothing was timed"
    return f"{best}, of {len(timed)} timed" + (f"; failed: {', '.join(failed)}" if failed else "")


def _say_warm(console: Console, bench: LayerBench) -> None:
    if bench.warm_tokens:
        counts = ", ".join(map(str, bench.warm_tokens))
        console.print(
            f"{bench.case.shape.name}: the L2 cache may have helped at {counts} tokens, for want of memory",
            style="yellow", markup=False, highlight=False,
        )  # fmt: skip


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s")


def _cost(tokens: int) -> float:
    return 1 + tokens / _TOKENS_OF_TWICE
