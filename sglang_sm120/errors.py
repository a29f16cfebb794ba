"""The package's errors. Each message has three parts: what was found, what is needed, how to fix it."""

from __future__ import annotations


class Sm120Error(Exception):
    """Base of every error that this package raises on purpose."""

    def __init__(self, found: str, needed: str, fix: str) -> None:
        self.found = found
        self.needed = needed
        self.fix = fix
        super().__init__(found, needed, fix)

    def __str__(self) -> str:
        return f"sglang-sm120: {self.found}\n  needed: {self.needed}\n  fix:    {self.fix}"


class UnsupportedError(Sm120Error, ValueError):
    """A request that is well formed but that this build, GPU or model cannot serve."""


class ContractError(Sm120Error, ValueError):
    """Arguments that break an operation's documented contract (shape, dtype, layout, range)."""


class HookError(Sm120Error, RuntimeError):
    """A place in SGLang that this package relies on is missing, has changed, or is not live."""


class ConfigError(Sm120Error, ValueError):
    """Options, environment variables or a checkpoint that are unknown, contradictory or damaged."""
