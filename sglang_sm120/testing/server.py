"""A real SGLang server as a context manager: started, watched, asked over HTTP, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

_PR_SET_PDEATHSIG = 1
_TERM_GRACE_S = 10.0


class ServerDied(RuntimeError):
    """The server ended, or did not answer in time. `log` is all that it printed."""

    def __init__(self, what: str, log: str) -> None:
        self.log = log
        super().__init__(f"{what}\n{_telling_lines(log)}")


class SglangServer:
    """`sglang serve MODEL args...` on a free local port.

    It is ended on exit, on an exception and on Ctrl-C, with every process that it started. When this process dies
    without a chance to do so the kernel ends the launcher, and SGLang's other processes end with it. Enter it from a
    thread that lives as long as the server: to the kernel, the parent is that thread.
    """

    def __init__(
        self,
        model_path: str | Path,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 240.0,
        on_wait: Callable[[float, str], None] | None = None,
        launcher: Sequence[str] = ("-c", "from sglang.cli.main import main; main()", "serve"),
    ) -> None:
        """on_wait: called about five times a second with the seconds waited and the last line of the log."""
        self.model_path = str(model_path)
        self.args = list(args)
        self.env = {**os.environ, **(env or {})}
        self.start_timeout_s = start_timeout_s
        self.on_wait = on_wait
        self.launcher = list(launcher)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_s = 0.0
        self._log_file = tempfile.NamedTemporaryFile(prefix="sglang-sm120-server-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [
            sys.executable, *self.launcher, "--model-path", self.model_path,
            "--host", "127.0.0.1", "--port", str(self.port), *self.args,
        ]  # fmt: skip

    def __enter__(self) -> SglangServer:
        self._process = subprocess.Popen(
            self.command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        assert self._process is not None
        start = time.monotonic()
        while True:
            self.startup_s = time.monotonic() - start
            if self._process.poll() is not None:
                raise ServerDied(f"the server ended with code {self._process.returncode} while starting", self.log())
            if self.startup_s > self.start_timeout_s:
                raise ServerDied(f"the server did not answer within {self.start_timeout_s:.0f} s", self.log())
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            if self.on_wait is not None:
                lines = self.log().splitlines()
                self.on_wait(self.startup_s, lines[-1] if lines else "")
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server and every process that it started. Safe to call twice."""
        process = self._process
        if process is None:
            return
        family = _family(process.pid)
        process.terminate()  # the launcher alone: its children would take a signal of their own for a crash
        _, family = psutil.wait_procs(family, timeout=_TERM_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for survivor in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        process.wait()
        self._process = None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """The launcher and its descendants, for tests that look for leftovers."""
        return [] if self._process is None else _family(self._process.pid)

    def log(self) -> str:
        return Path(self._log_file.name).read_text(encoding="utf-8", errors="replace")

    def our_lines(self) -> list[str]:
        """What sglang-sm120 logged, without the time stamps."""
        return [line[line.index("sglang-sm120:") :] for line in self.log().splitlines() if "sglang-sm120:" in line]

    def info(self) -> dict[str, Any]:
        return self._json("GET", "/server_info")

    def generate(self, input_ids: list[int] | list[list[int]], *, max_new_tokens: int = 16, **extra: Any) -> Any:
        """POST /generate, greedy and ignoring the end token unless `sampling_params` in `extra` says otherwise."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        sampling.update(extra.pop("sampling_params", {}))
        return self._json("POST", "/generate", json={"input_ids": input_ids, "sampling_params": sampling, **extra})

    def _json(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = httpx.request(method, self.url + path, timeout=300, **kwargs)
        except httpx.HTTPError as error:
            if self._process is not None:  # a connection breaks a moment before the process is gone
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=2)
            if not self.alive():
                raise ServerDied(f"the server ended while answering {path}", self.log()) from error
            raise
        response.raise_for_status()
        return response.json()


def _telling_lines(log: str) -> str:
    """Of a log, what a person needs: our own message if there is one, else the last lines."""
    lines = log.splitlines()
    for position, line in enumerate(lines):
        if "sglang-sm120: " in line and any("  needed: " in later for later in lines[position : position + 40]):
            end = next((i for i in range(position, len(lines)) if "  fix: " in lines[i]), len(lines) - 1)
            return "\n".join(lines[position : end + 1])
    return "\n".join(lines[-25:])


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
