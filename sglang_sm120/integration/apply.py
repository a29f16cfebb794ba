"""Installs the rows of the hook table in this process, and verifies that they are live."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Collection
from pathlib import Path

from sglang_sm120.errors import HookError
from sglang_sm120.integration.check import HookProblem, check_tree, version_problem
from sglang_sm120.integration.hooks import HOOKS, Hook, Stage, hook

logger = logging.getLogger(__name__)

_FIX = (
    "install a SGLang that this version supports (`sglang-sm120 doctor` lists what fits), or drop --enable-sm120-opts"
)

_used_doors: set[str] = set()


def sglang_version() -> str:
    """The version of the SGLang that this process imports."""
    from sglang.version import __version__

    return __version__


def sglang_root() -> Path:
    """The folder of the package `sglang` that this process imports."""
    import sglang

    return Path(next(iter(sglang.__path__)))


def require_version() -> None:
    """Raises HookError if this SGLang is outside the supported range."""
    problem = version_problem(sglang_version())
    if problem is not None:
        raise HookError(problem.found, problem.needed, _FIX)


def require_tree() -> None:
    """Compare the whole table with the installed SGLang before weights load. Raises HookError with the full list."""
    require_version()
    problems = check_tree(sglang_root(), sglang_version())
    _raise(problems, "SGLang's source does not match the hook table")


def install(stage: Stage) -> None:
    """Register a stage's hooks and apply them, or use the doors of a patched SGLang instead. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for row in (row for row in HOOKS if row.stage is stage):
        register = _open_door(row)
        if register is not None:
            _use_door(row, register)
            continue
        entry = _resolve(row.entry)
        if any(registered is entry for _, registered, _ in HookRegistry._hooks.get(row.target, ())):
            continue
        HookRegistry.register(row.target, entry, HookType(row.kind))
    HookRegistry.apply_hooks()


def verify(stages: Collection[Stage]) -> None:
    """Check that every expected hook is live here: reachable from its target. Raises HookError with the list."""
    problems = []
    for row in HOOKS:
        if row.stage in stages and _open_door(row) is None:
            found = _liveness(row)
            if found is not None:
                problems.append(HookProblem(row.name, found, f"{row.entry} on {row.target}"))
    _raise(problems, "hooks are not live")


def has_options_door() -> bool:
    """Whether a patched SGLang takes our `Engine` keywords itself."""
    return _open_door(hook("cli_flags")) is not None


def report_doors() -> None:
    """Log the doors in use. Not where they are opened: SGLang sets its logging up after that."""
    for door in sorted(_used_doors):
        names = ", ".join(row.name for row in HOOKS if row.door == door)
        logger.info("sglang-sm120: %s is there; not needed: hook %s", door, names)


def _liveness(row: Hook) -> str | None:
    """Why a hook is not live, or None. Looks at the attribute itself, not at the registry's books."""
    owner_path, _, name = row.target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
    except (ImportError, AttributeError) as error:
        return f"{owner_path} cannot be resolved ({error})"
    function = getattr(owner, name, None)
    if function is None:
        return f"{name} is not in {owner_path}"
    function = getattr(function, "__func__", function)
    entry = _resolve(row.entry)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is entry for cell in cells):
            return None
        function = getattr(function, "__wrapped__", None)
    return f"{row.target} does not lead to it (another hook or plugin took the target first, or replaced it later)"


def _open_door(row: Hook) -> Callable | None:
    """The patched SGLang's own registration function that replaces this hook, or None."""
    if row.door is None:
        return None
    try:
        return _resolve(row.door)
    except (ImportError, AttributeError):
        return None


def _use_door(row: Hook, register: Callable) -> None:
    from sglang_sm120.integration import doors

    assert row.door is not None
    if row.door not in _used_doors:
        _used_doors.add(row.door)
        doors.register(row.door, register)


def _resolve(path: str) -> Callable:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _raise(problems: list[HookProblem], found: str) -> None:
    if problems:
        listed = "\n    - ".join(str(problem) for problem in problems)
        raise HookError(f"{found}:\n    - {listed}", "every hook of docs/hooks.md that this server needs", _FIX)
