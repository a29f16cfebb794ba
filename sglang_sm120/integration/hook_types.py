"""What a row of the hook table says. Standard library only, as the tables themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

SGLANG_RANGE = ((0, 5, 23), (0, 5, 24))
"""First version that is served, and first that is not (pyproject.toml says the same; a test compares them)."""


class Stage(Enum):
    """Which processes install a hook, and when."""

    PROCESS = "every SGLang process, at plugin load"
    SCHEDULER = "scheduler processes, after the configuration is published"
    ALL_REDUCE = "scheduler processes of a tensor-parallel server, unless --sm120-all-reduce is off or stock"
    EMULATION = "scheduler processes, only with --sm120-emulate"
    CPU = "scheduler processes, only with --sm120-emulate on the CPU"


@dataclass(frozen=True)
class Extension:
    """A supported door: `door` is SGLang's name for it, `entry` is ours."""

    name: str
    door: str
    entry: str
    reason: str


@dataclass(frozen=True)
class Hook:
    """A monkey-patch.

    target: dotted path of the function or method that is wrapped. kind: `after` or `around` (HookRegistry's words).
    entry: our function, `module:name`. parameters: those of the target that the entry relies on. sources: SGLang
    version -> digest of the target's source (see `check.source_digest`); any other source is refused. patch: file in
    patches/ that makes the hook unnecessary, or None and `no_patch` says why. door: attribute, `module:name`, that the
    patched SGLang has; where it is found the door is used and the hook is not installed.
    """

    name: str
    target: str
    kind: str
    entry: str
    stage: Stage
    reason: str
    parameters: tuple[str, ...]
    sources: Mapping[str, str]
    patch: str | None = None
    door: str | None = None
    no_patch: str = ""
