"""The static check: the installed SGLang fits, and every way in which a target can change is noticed and named."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from sglang_sm120.integration.check import check_tree, find_target, source_digest, version_problem
from sglang_sm120.integration.hooks import HOOKS, SGLANG_RANGE, Hook

every_hook = pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)


def test_the_installed_sglang_fits(installed) -> None:
    assert len(HOOKS) >= 6
    assert check_tree(installed, "0.5.23") == []


@every_hook
def test_a_renamed_target_is_named(hook: Hook, changed_tree) -> None:
    name = hook.target.rsplit(".", 1)[1]
    tree = changed_tree(hook, lambda text: text.replace(f"def {name}(", f"def {name}_renamed(", 1))
    (problem,) = check_tree(tree, "0.5.23", [hook])
    assert problem.hook == hook.name
    assert f"{name} is not in" in problem.found


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.parameters], ids=lambda hook: hook.name)
def test_a_changed_signature_is_named(hook: Hook, changed_tree) -> None:
    gone = hook.parameters[-1]
    tree = changed_tree(hook, lambda text: re.sub(rf"\b{gone}\b", gone + "_2", text))
    (problem,) = check_tree(tree, "0.5.23", [hook])
    assert problem.hook == hook.name
    assert f"has no parameter {gone}" in problem.found


@every_hook
def test_a_changed_body_is_refused(hook: Hook, changed_tree) -> None:
    def add_a_statement(text: str) -> str:
        indent = " " * (len(text) - len(text.lstrip()) + 4)
        return text.rstrip("\n") + f"\n{indent}pass\n"

    tree = changed_tree(hook, add_a_statement)
    (problem,) = check_tree(tree, "0.5.23", [hook])
    assert problem.hook == hook.name
    assert "not one that was tested" in problem.found


def test_an_unknown_version_of_the_same_source_is_refused(installed) -> None:
    assert [problem.hook for problem in check_tree(installed, "0.5.24")] == [hook.name for hook in HOOKS]


def test_an_empty_tree_names_every_hook(tmp_path) -> None:
    assert len(check_tree(tmp_path / "sglang", "0.5.23")) == len(HOOKS)


def test_a_digest_ignores_indentation_only(installed) -> None:
    source, node = find_target(installed, HOOKS[0].target)
    shifted = "if True:\n" + "".join("    " + line for line in source.splitlines(keepends=True))
    class_node = ast.parse(shifted).body[0]
    (inner,) = [n for n in ast.walk(class_node) if isinstance(n, ast.FunctionDef) and n.name == node.name]
    assert source_digest(shifted, inner) == source_digest(source, node)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.5.23", True), ("0.5.23+cu130", True), ("0.5.22", False), ("0.5.24", False), ("0.6.0", False), ("1.0", False)],
)
def test_version_range(version: str, fits: bool) -> None:
    assert (version_problem(version) is None) is fits


def test_the_range_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, version)) for version in SGLANG_RANGE)
    assert f"sglang>={first},<{end}" in project["dependencies"]
    assert not any(word in " ".join(project["dependencies"]) for word in ("torch", "flashinfer")), "SGLang pins these"
