"""The recorded machines, and machines made up from them for one test.

As a program (`python -m tests.doctor.recorded_machines`) it writes anew what doctor says of each: docs/doctor.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_sm120 import cli
from sglang_sm120.doctor import command
from sglang_sm120.doctor.checks import judge
from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.facts_gpus import Gpu
from sglang_sm120.doctor.machine import Output, Recording
from sglang_sm120.findings import Finding

MACHINES = Path(__file__).parent / "machines"
HEALTHY = "turin-8-rtx-pro-6000"
NAMES = tuple(sorted(path.name for path in MACHINES.iterdir() if (path / "machine.json").exists()))


def facts_of(name: str = HEALTHY) -> Facts:
    return gather(Recording(MACHINES / name))


def with_gpus(facts: Facts, count: int, **changes: Any) -> Facts:
    """The first GPUs, all of them changed."""
    gpus: Sequence[Gpu] = facts.driver.gpus[:count]
    return replace(facts, driver=replace(facts.driver, gpus=tuple(replace(gpu, **changes) for gpu in gpus)))


def with_python(facts: Facts, **changes: Any) -> Facts:
    """packages: merged into those that are there; None takes one away."""
    packages: Mapping[str, Any] = facts.python["packages"] | changes.pop("packages", {})
    merged = {name: versions for name, versions in packages.items() if versions is not None}
    return replace(facts, python={**facts.python, **changes, "packages": merged})


def of(facts: Facts, check: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in judge(facts) if finding.check == check]


def only(facts: Facts, check: str) -> Finding:
    """The one finding of that check."""
    (found,) = of(facts, check)
    return found


def bad(facts: Facts) -> set[tuple[str, str]]:
    """Level and check of what is "warn" or "fail"."""
    return {(finding.level, finding.check) for finding in judge(facts) if finding.level in ("warn", "fail")}


class Silent:
    """A machine that has nothing and where no command is there."""

    environ: Mapping[str, str] = {}

    def run(self, name: str) -> Output:
        return Output("missing")

    def text(self, path: str) -> str:
        return ""

    def data(self, path: str) -> bytes:
        return b""

    def names(self, path: str) -> tuple[str, ...]:
        return ()

    def real(self, path: str) -> str:
        return ""

    def space(self, path: str) -> tuple[int, int] | None:
        return None

    def python(self) -> dict[str, Any]:
        return {}

    def profiles(self, gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
        return []


def said(name: str, *options: str) -> str:
    """What `sglang-sm120 doctor` prints about a recorded machine."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["doctor", "--machine", str(MACHINES / name), *options])
    return out.getvalue()


def arguments(*words: str) -> argparse.Namespace:
    """Parsed as those of `sglang-sm120 doctor`."""
    parser = argparse.ArgumentParser()
    command.add_doctor_arguments(parser)
    return parser.parse_args(words)


if __name__ == "__main__":
    for each in NAMES:
        (MACHINES / each / "expected.txt").write_text(said(each, "--fix-hints"))
        (MACHINES / each / "expected.json").write_text(said(each, "--json"))
