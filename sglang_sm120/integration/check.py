"""Compares the hook table with an SGLang source tree, without importing SGLang: the early warning for a new version."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.integration.hooks import HOOKS, SGLANG_RANGE, Hook


@dataclass(frozen=True)
class HookProblem:
    """Why a hook cannot be relied on: `hook` is its name in docs/hooks.md."""

    hook: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.hook}: {self.found}; needed: {self.needed}"


def version_problem(version: str) -> HookProblem | None:
    """A problem if this SGLang version is outside the range that the table was tested with."""
    first, end = SGLANG_RANGE
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if first <= numbers < end:
        return None
    needed = f"SGLang >= {'.'.join(map(str, first))}, < {'.'.join(map(str, end))}"
    return HookProblem("sglang", f"SGLang {version}", needed)


def check_tree(sglang_root: Path, version: str, hooks: Iterable[Hook] = HOOKS) -> list[HookProblem]:
    """Every hook of the table that does not fit the tree.

    sglang_root: the folder of the package `sglang` (it holds `srt/`). A hook whose door is there is skipped: the
    patched SGLang does not need it.
    """
    problems = []
    parsed: dict[Path, tuple[str, ast.Module]] = {}
    for row in hooks:
        if row.door is not None and has_door(sglang_root, row.door):
            continue
        problem = _check_hook(row, sglang_root, version, parsed)
        if problem is not None:
            problems.append(problem)
    return problems


def has_door(sglang_root: Path, door: str) -> bool:
    """Whether the tree offers the door `module:name`: the file is there and defines the name at module level."""
    module, _, name = door.partition(":")
    file = sglang_root.parent / (module.replace(".", "/") + ".py")
    if not file.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(file.read_text()).body)


def source_digest(source: str, node: ast.AST) -> str:
    """First 16 hex digits of the sha256 of a definition's source text, without trailing blanks and indentation."""
    lines = (ast.get_source_segment(source, node, padded=True) or "").splitlines()
    text = "\n".join(line.strip() for line in lines)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def target_file(sglang_root: Path, target: str) -> tuple[Path | None, list[str]]:
    """The file of a dotted target path's module (None if the tree has none), and the names that lead on from there."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        file = sglang_root.parent.joinpath(*parts[:split]).with_suffix(".py")
        if file.is_file():
            return file, parts[split:]
    return None, parts


def find_target(sglang_root: Path, target: str, parsed: dict[Path, tuple[str, ast.Module]] | None = None):
    """The source text and the function node of a dotted target path, or a string that says what is missing."""
    file, names = target_file(sglang_root, target)
    if file is None:
        return f"no module of {target} in {sglang_root}"
    parsed = {} if parsed is None else parsed
    if file not in parsed:
        text = file.read_text(encoding="utf-8")
        parsed[file] = (text, ast.parse(text))
    source, node = parsed[file]
    scope: ast.AST = node
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [child for child in ast.iter_child_nodes(scope) if isinstance(child, kinds) and child.name == name]
        if not found:
            return f"{name} is not in {file.relative_to(sglang_root.parent)}"
        scope = found[-1]
    if not isinstance(scope, ast.FunctionDef):
        return f"{target} is not a plain function"
    return source, scope


def _check_hook(
    row: Hook, sglang_root: Path, version: str, parsed: dict[Path, tuple[str, ast.Module]]
) -> HookProblem | None:
    result = find_target(sglang_root, row.target, parsed)
    if isinstance(result, str):
        return HookProblem(row.name, result, row.target)
    source, node = result
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    missing = [name for name in row.parameters if name not in arguments]
    if missing:
        return HookProblem(
            row.name,
            f"{row.target}({', '.join(arguments)}) has no parameter {', '.join(missing)}",
            f"parameters {', '.join(row.parameters)}",
        )
    known = row.sources.get(version.split("+")[0])
    digest = source_digest(source, node)
    if digest != known:
        return HookProblem(
            row.name, f"the source of {row.target} is not one that was tested (digest {digest})", f"digest {known}"
        )
    return None
