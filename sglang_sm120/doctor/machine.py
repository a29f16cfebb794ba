"""Where `doctor` reads from: this machine, or a recording of another in a folder. Nothing here changes a setting.

A recording has a text for each command, the files that were read, in one text, and the rest as JSON. So the findings of
a machine that is far away can be made again, and its texts read by people.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sglang_sm120.doctor import facts_profiles, facts_python, recording_format, redact
from sglang_sm120.kernels.communication.p2p_probe.environment import Files, Reader, acs_control, config_with_acs

ENVIRONMENT = (
    "CUDA_", "CXX", "FLASHINFER_", "LD_", "NCCL_", "NVIDIA_", "OMP_", "PYTHONPATH", "PYTORCH_", "SGLANG_",
    "SGL_", "TORCH", "TRITON_", "XDG_CACHE_HOME",
)  # fmt: skip
"""What variables begin with that are looked at, and shown in a report."""

# What torch says of itself and of the GPUs, in a process that may crash or hang; the first line before CUDA is touched.
_TORCH = """
import json
import torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda,
    "archs": torch._C._cuda_getArchFlags().split() if torch.version.cuda else []}), flush=True)
if torch.version.cuda:
    try:
        torch.cuda.init()
        got = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        print(json.dumps({"gpus": [{"name": p.name, "capability": [p.major, p.minor],
            "multiprocessors": p.multi_processor_count} for p in got]}), flush=True)
    except Exception as error:
        print(json.dumps({"cuda_error": str(error)}), flush=True)
"""

_COMMANDS: dict[str, tuple[tuple[str, ...], float]] = {
    "nvidia-smi-q": (("nvidia-smi", "-q", "-x"), 30),
    "nvidia-smi-capability": (("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"), 30),
    "nvidia-smi-topo": (("nvidia-smi", "topo", "-m"), 30),
    "nvidia-smi-p2p": (("nvidia-smi", "topo", "-p2p", "r"), 30),
    "lspci": (("lspci", "-D", "-vvv"), 15),
    "nvcc": (("nvcc", "--version"), 15),
    "torch": ((sys.executable, "-c", _TORCH), 90),
}
COMMANDS = tuple(_COMMANDS)


@dataclass(frozen=True)
class Output:
    """What a command wrote. state: "ok", "missing", "failed" (with `code`), "hung" or "skipped".

    text: what it printed; where it failed or hung, what it said as an error too, below, since a tool that fails half
    way may have said much that is of use. code: its exit status; negative: the signal that ended it.
    """

    state: str
    text: str = ""
    code: int = 0

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    def why(self) -> str:
        """Why there is nothing more, in a line of at most 300 characters; empty where all is well."""
        if self.state in ("ok", "skipped"):
            return ""
        if self.state == "missing":
            return "not found"
        if self.state == "hung":
            return "it does not answer"
        # Data is no reason: XML and what is indented below it, JSON.
        lines = [line.strip() for line in self.text.splitlines() if re.match(r"[^\s<{]", line)]
        if "Traceback (most recent call last):" in lines:
            lines = lines[-1:]
        if lines:
            return " ".join(" ".join(lines).split())[:300]
        if self.code >= 0:
            return f"exit status {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else str(-self.code)
        return f"ended by signal {name}"


class Machine(Reader, Protocol):
    """What facts are read from; paths are absolute."""

    environ: Mapping[str, str]

    def run(self, name: str) -> Output:
        """One of COMMANDS, killed when it takes too long."""
        ...

    def space(self, path: str) -> tuple[int, int] | None:
        """Bytes of the file system there, and how many are free."""
        ...

    def python(self) -> dict[str, Any]:
        """`facts_python.gather` of the Python that serves."""
        ...

    def profiles(self, gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
        """`facts_profiles.read` for these GPUs, as torch named them."""
        ...


class ThisMachine(Files):
    """The machine that this process runs on. quick: starts no process and opens no library."""

    def __init__(self, environ: Mapping[str, str] | None = None, *, quick: bool = False) -> None:
        super().__init__()
        given = os.environ if environ is None else environ
        self.environ: Mapping[str, str] = {name: text for name, text in given.items() if name.startswith(ENVIRONMENT)}
        self.quick = quick

    def run(self, name: str) -> Output:
        if self.quick:
            return Output("skipped")
        argv, limit_s = _COMMANDS[name]
        if name == "nvcc":
            argv = (facts_python.nvcc_path(self.environ) or "nvcc", *argv[1:])
        return _run(argv, limit_s)

    def space(self, path: str) -> tuple[int, int] | None:
        try:
            there = os.statvfs(path)
        except (AttributeError, OSError):
            return None
        return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize

    def python(self) -> dict[str, Any]:
        return facts_python.gather(self.environ, quick=self.quick)

    def profiles(self, gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what torch imports may print, and --json is one object
                return facts_profiles.read(gpus, driver)
        except Exception as error:  # a folder that may not be read; a user without a home; a damaged package
            return [{"kind": "MoE", "path": "", "state": "unreadable", "detail": str(error)}]


def _run(argv: tuple[str, ...], limit_s: float) -> Output:
    environ = os.environ | {"LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return Output("missing")
    except OSError as error:
        return Output("failed", str(error), 126)
    hung = False
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as expired:
        hung = True
        out, err = expired.stdout or b"", expired.stderr or b""
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=1)
        except subprocess.TimeoutExpired as again:  # stuck in the driver: even SIGKILL waits for it
            out, err = again.stdout or out, again.stderr or err
    if not hung and process.returncode == 0:
        return Output("ok", (out or err).decode(errors="replace"))
    both = "\n".join(part.decode(errors="replace") for part in (out, err) if part)
    return Output("hung", both) if hung else Output("failed", both, process.returncode)


class Recorder:
    """A machine that remembers all that was asked of it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.environ = machine.environ
        self.outputs: dict[str, Output] = {}
        self.files: dict[str, str] = {}
        self.folders: dict[str, tuple[str, ...]] = {}
        self.links: dict[str, str] = {}
        self.spaces: dict[str, tuple[int, int] | None] = {}
        self.acs: dict[str, int] = {}
        self.packages: dict[str, Any] = {}
        self.tuned: list[dict[str, str]] = []

    def run(self, name: str) -> Output:
        if name not in self.outputs:
            self.outputs[name] = self._machine.run(name)
        return self.outputs[name]

    def text(self, path: str) -> str:
        self.files[path] = self._machine.text(path)
        return self.files[path]

    def data(self, path: str) -> bytes:
        content = self._machine.data(path)
        self.acs[path] = acs_control(content)
        return content

    def names(self, path: str) -> tuple[str, ...]:
        self.folders[path] = self._machine.names(path)
        return self.folders[path]

    def real(self, path: str) -> str:
        self.links[path] = self._machine.real(path)
        return self.links[path]

    def space(self, path: str) -> tuple[int, int] | None:
        self.spaces[path] = self._machine.space(path)
        return self.spaces[path]

    def python(self) -> dict[str, Any]:
        if not self.packages:
            self.packages = self._machine.python()
        return self.packages

    def profiles(self, gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
        self.tuned = self._machine.profiles(gpus, driver)
        return self.tuned

    def sections(self) -> dict[str, str]:
        """Name -> text of each part of a recording, not yet redacted; the names are those of its files."""
        parts = {f"{name}.txt": output.text for name, output in self.outputs.items() if output.text}
        lines = []
        for path, text in sorted(self.files.items()):
            if text := redact.file_text(path, text):
                lines += [f"=== {path}", text.rstrip("\n")]
        parts["files.txt"] = "\n".join(lines) + "\n"
        parts["machine.json"] = json.dumps(
            {
                "environ": redact.variables(dict(sorted(self.environ.items()))),
                "states": {n: [o.state, o.code] for n, o in self.outputs.items() if o.state != _usual_state(o.text)},
                "folders": {path: names for path, names in sorted(self.folders.items()) if names},
                "links": {path: real for path, real in sorted(self.links.items()) if real},
                "spaces": {path: space for path, space in self.spaces.items() if space},
                "acs": {path: control for path, control in sorted(self.acs.items()) if control},
                "python": self.packages,
                "profiles": self.tuned,
            },
            indent=1,
        ) + "\n"  # fmt: skip
        return parts


def _usual_state(text: str) -> str:
    """Of a command that wrote this; another is recorded."""
    return "ok" if text else "missing"


class Recording:
    """A machine as it was recorded in a folder."""

    def __init__(self, folder: Path) -> None:
        """Reads all of it, so that a damaged one is known at once.

        Raises:
            OSError, ValueError: a file is missing, unreadable, or not as `Recorder` writes it.
        """
        self._rest = recording_format.read_rest(folder)
        self._files = recording_format.read_files(folder)
        self._texts = recording_format.read_texts(folder, COMMANDS)
        self.environ: Mapping[str, str] = self._rest["environ"]

    def run(self, name: str) -> Output:
        text = self._texts.get(name, "")
        state, code = self._rest.get("states", {}).get(name, [_usual_state(text), 0])[:2]
        return Output(state, text, code)

    def text(self, path: str) -> str:
        return self._files.get(path, "")

    def data(self, path: str) -> bytes:
        """Configuration spaces are the only such files; of them a recording has what says whether ACS redirects."""
        control = self._rest.get("acs", {}).get(path)
        return config_with_acs(control) if control else b""

    def names(self, path: str) -> tuple[str, ...]:
        """Those that were recorded, or that follow from the recorded files."""
        if path in self._rest.get("folders", {}):
            return tuple(self._rest["folders"][path])
        start = path.rstrip("/") + "/"
        return tuple(sorted({file[len(start) :].partition("/")[0] for file in self._files if file.startswith(start)}))

    def real(self, path: str) -> str:
        return self._rest.get("links", {}).get(path, "")

    def space(self, path: str) -> tuple[int, int] | None:
        space = self._rest.get("spaces", {}).get(path)
        return (space[0], space[1]) if space else None

    def python(self) -> dict[str, Any]:
        return self._rest.get("python", {})

    def profiles(self, gpus: Sequence[Mapping[str, Any]], driver: str) -> list[dict[str, str]]:
        return self._rest.get("profiles", [])
