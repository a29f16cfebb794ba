"""requirements-cpu.txt, the lean list: it goes stale when SGLang, or anything in it, changes what it needs."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_sm120.integration.check import version_problem

ROOT = Path(__file__).parent.parent
LINES = [line for line in (ROOT / "requirements-cpu.txt").read_text().splitlines() if line and line[0] != "#"]
PINS = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in LINES}

# The list departs from SGLang's own pins here: a CPU build of torch, what fits it, and newer releases that serve.
DIFFERENT = {"torch", "torchvision", "soundfile", "tokenizers", "xgrammar", "apache-tvm-ffi", "compressed-tensors"}

# SGLang imports these itself, but requires them only through packages that the list leaves out.
IMPORTED_ALL_THE_SAME = ("dill", "jsonschema")


def _requirements(name: str) -> dict[str, Requirement]:
    """What an installed package needs here, without extras."""
    found = [Requirement(text) for text in metadata.requires(name) or ()]
    return {
        canonicalize_name(requirement.name): requirement
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }


def _closure(name: str) -> set[str]:
    """A package's requirements, theirs, and so on, as far as they are installed."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        try:
            new = set(_requirements(todo.pop())) - seen
        except metadata.PackageNotFoundError:
            continue
        seen |= new
        todo += new
    return seen


def test_the_list_is_one_of_exact_pins() -> None:
    assert len(PINS) == len(LINES) > 80
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+]*", line) for line in LINES)


def test_it_is_for_the_sglang_that_is_supported() -> None:
    assert version_problem(PINS["sglang"]) is None
    assert metadata.version("sglang") == PINS["sglang"]


def test_every_entry_is_one_that_sglang_needs() -> None:
    needed = {"sglang"}.union(*(_closure(name) | {name} for name in ("sglang", *IMPORTED_ALL_THE_SAME)))
    extra = set(PINS) - needed
    assert not extra, f"nothing needs these any more: {sorted(extra)}"


def test_nothing_that_its_entries_need_is_missing() -> None:
    if metadata.version("torch") != PINS["torch"]:
        pytest.skip("this environment was not made from the list")
    missing = {
        f"{name} needs {needed}"
        for name in PINS
        if name != "sglang"
        for needed in _requirements(name)
        if needed not in PINS and needed != "setuptools"  # setup_env.py installs that one
    }
    assert not missing


def test_it_departs_from_sglangs_pins_only_where_it_says() -> None:
    pinned = {
        name: requirement.specifier
        for name, requirement in _requirements("sglang").items()
        if str(requirement.specifier).startswith("==")
    }
    assert len(pinned) > 5
    different = {name for name, specifier in pinned.items() if name in PINS and not specifier.contains(PINS[name])}
    assert different <= DIFFERENT, different - DIFFERENT


def test_what_this_package_needs_itself_is_in_the_list() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert "sglang" in ours
    assert ours <= set(PINS)
