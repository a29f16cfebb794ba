"""A recorded machine of which one command says something else, as tools do on machines in trouble."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from recorded_machines import HEALTHY, MACHINES

from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.machine import Output, Recording

Change = Output | Callable[[str], str]
"""A command's whole output, or what becomes of its recorded text, with the recorded status."""


class Mutated(Recording):
    """Commands by name; files by path; environ: merged into the recorded one."""

    def __init__(
        self,
        name: str = HEALTHY,
        commands: Mapping[str, Change] | None = None,
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        python: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(MACHINES / name)
        unknown = set(commands or {}) - {path.stem for path in (MACHINES / HEALTHY).glob("*.txt")}
        assert not unknown, f"no commands: {unknown}"
        self._commands, self._changed, self._more = commands or {}, files or {}, python or {}
        self.environ = {**self.environ, **(environ or {})}

    def run(self, name: str) -> Output:
        output = super().run(name)
        change = self._commands.get(name)
        if change is None:
            return output
        return change if isinstance(change, Output) else Output(output.state, change(output.text), output.code)

    def text(self, path: str) -> str:
        return self._changed.get(path, super().text(path))

    def names(self, path: str) -> tuple[str, ...]:
        start = path.rstrip("/") + "/"
        more = {file[len(start) :].partition("/")[0] for file in self._changed if file.startswith(start)}
        return tuple(sorted({*super().names(path), *more}))

    def python(self) -> dict[str, Any]:
        return {**super().python(), **self._more}


def mutated(name: str = HEALTHY, **changes: Any) -> Facts:
    """The facts of a `Mutated` machine; arguments as there."""
    return gather(Mutated(name, **changes))


def smi(text: str, code: int = 255, listing: str | None = None) -> dict[str, Output]:
    """nvidia-smi that fails with this text, whatever it is asked for."""
    failed = Output("failed", text, code)
    commands = dict.fromkeys(("nvidia-smi-q", "nvidia-smi-topo", "nvidia-smi-p2p"), failed)
    return commands | {"nvidia-smi-capability": failed if listing is None else Output("failed", listing, code)}


def in_gpu(index: int, tag: str, value: str) -> Callable[[str], str]:
    """Every element of that tag in one GPU of `nvidia-smi -q -x` gets this text; where there is none, one is added."""

    def change(text: str) -> str:
        parts = text.split("<gpu id=")
        block, found = re.subn(rf"(<{tag}>)[^<]*(</{tag}>)", rf"\g<1>{value}\g<2>", parts[index + 1])
        parts[index + 1] = block if found else block.replace("</gpu>", f"<{tag}>{value}</{tag}></gpu>")
        return "<gpu id=".join(parts)

    return change


def every_field(index: int, value: str) -> Callable[[str], str]:
    """All values of one GPU but its place become this text."""

    def change(text: str) -> str:
        parts = text.split("<gpu id=")
        kept = r"<(?!pci_bus|product_name)(\w+)>[^<\s][^<]*</\1>"
        parts[index + 1] = re.sub(kept, rf"<\1>{value}</\1>", parts[index + 1])
        return "<gpu id=".join(parts)

    return change


def without_gpu(index: int) -> Callable[[str], str]:
    """The element of one GPU is not there."""

    def change(text: str) -> str:
        blocks = re.findall(r"\t<gpu id=.*?</gpu>\n", text, re.DOTALL)
        return text.replace(blocks[index], "")

    return change
