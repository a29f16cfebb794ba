"""SglangServer with small programs in SGLang's place: ready, failing, late, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.testing import server as server_module
from sglang_sm120.testing.server import ServerDied, SglangServer

# Options: --log TEXT (printed at start), --die CODE, --silent (never listens), --busy N (503 for N questions),
# --children N (deaf to SIGTERM), --outlive (they survive their parent), --own-session (of each child).
FAKE_SERVER = """
import argparse, ctypes, http.server, json, os, signal, subprocess, sys, time

parser = argparse.ArgumentParser()
for name in ("--model-path", "--host", "--log"):
    parser.add_argument(name)
for name in ("--port", "--die", "--busy", "--children"):
    parser.add_argument(name, type=int)
for name in ("--silent", "--outlive", "--own-session"):
    parser.add_argument(name, action="store_true")
args = parser.parse_args()
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
for _ in range(args.children or 0):
    # SGLang's own children ask the kernel to die with their parent, as here without --outlive.
    die_with_parent = None if args.outlive else lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, preexec_fn=die_with_parent,
                               start_new_session=args.own_session)
    process.stdout.readline()
    print("child", process.pid, flush=True)
print(args.log or "no --log", flush=True)
if args.die is not None:
    sys.exit(args.die)
if args.silent:
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    questions = 0

    def answer(self, value, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self):
        Handler.questions += 1
        busy = self.path == "/health" and Handler.questions <= (args.busy or 0)
        info = {"model_path": args.model_path, "variable": os.environ.get("VARIABLE"), "questions": Handler.questions}
        self.answer(info, 503 if busy else 200)

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""

PARENT = """
import signal, sys, time
from sglang_sm120.testing import server as module
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job started in the background inherits it as ignored
module._TERM_GRACE_S = 0.2
with module.SglangServer("model", ["--children", "2", *sys.argv[2:]], launcher=[sys.argv[1]]) as server:
    print(*(process.pid for process in server.processes()), flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TERM_GRACE_S", 0.2)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "fake_server.py"
    path.write_text(FAKE_SERVER)
    return str(path)


@pytest.fixture
def start(program: str):
    """(arguments, keywords of SglangServer) -> a server that runs the fake program."""

    def make(*args: str, **keywords) -> SglangServer:
        return SglangServer("model", args, launcher=[program], start_timeout_s=60, **keywords)

    return make


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after a while; a process that nobody waited for yet does not count."""
    deadline = time.monotonic() + 20
    running = processes
    while running and time.monotonic() < deadline:
        running = [p for p in running if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return running


def children_in(log: str) -> list[psutil.Process]:
    pids = [int(line.split()[1]) for line in log.splitlines() if line.startswith("child ")]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_ready_answers_and_log(start) -> None:
    with start("--busy", "2", "--log", "sglang-sm120: hello", env={"VARIABLE": "set"}) as server:
        assert server.alive()
        assert server.info() == {"model_path": "model", "variable": "set", "questions": 4}, "it waited through two 503"
        assert server.generate([1, 2], max_new_tokens=3, rid="r") == {
            "input_ids": [1, 2],
            "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
            "rid": "r",
        }
        sampling = server.generate([1], sampling_params={"temperature": 1})["sampling_params"]
        assert sampling == {"temperature": 1, "max_new_tokens": 16, "ignore_eos": True}
        assert server.our_lines() == ["sglang-sm120: hello"]
        (process,) = server.processes()
    assert not left([process])
    assert not server.alive()
    assert server.processes() == []
    assert "sglang-sm120: hello\n" in server.log(), "the log outlives the server"
    server.stop()


def test_an_error_answer_is_raised(start) -> None:
    with start() as server, pytest.raises(httpx.HTTPStatusError):
        server._json("PUT", "/generate")


def test_stop_ends_children_that_ignore_sigterm_and_left_the_group(start) -> None:
    with start("--children", "2", "--outlive", "--own-session") as server:
        family = server.processes()
        assert len(family) == 3
    assert not left(family)


def test_an_exception_in_the_block_leaves_nothing(start) -> None:
    family: list[psutil.Process] = []
    with pytest.raises(ZeroDivisionError), start("--children", "1") as server:
        family = server.processes()
        _ = 1 / 0
    assert len(family) == 2
    assert not left(family)


def test_a_server_that_dies_at_start_shows_the_last_lines(start) -> None:
    lines = "\n".join(f"line {i}" for i in range(100))
    with pytest.raises(ServerDied) as caught, start("--log", lines, "--die", "7"):
        pass
    assert "ended with code 7 while starting" in str(caught.value)
    assert str(caught.value).endswith("\nline 98\nline 99")
    assert "line 50\n" not in str(caught.value)
    assert "line 50\n" in caught.value.log


def test_a_server_that_dies_with_our_message_shows_just_that(start) -> None:
    message = str(ConfigError("what was found", "what is needed", "how to fix it"))
    log = f"Traceback: noise\n{message}\n" + "more noise\n" * 50
    with pytest.raises(ServerDied) as caught, start("--log", log, "--die", "1"):
        pass
    assert message in str(caught.value)
    assert "noise" not in str(caught.value)


def test_children_of_a_launcher_that_died_at_start_are_ended(start) -> None:
    with pytest.raises(ServerDied) as caught, start("--children", "2", "--outlive", "--die", "0"):
        pass
    assert caught.value.log.count("child ") == 2
    assert not left(children_in(caught.value.log))


def test_a_server_that_never_answers(program: str) -> None:
    seen: list[tuple[float, str]] = []
    server = SglangServer(
        "model", ["--silent", "--children", "1", "--log", "still loading"], launcher=[program],
        start_timeout_s=3, on_wait=lambda seconds, line: seen.append((seconds, line)),
    )  # fmt: skip
    with pytest.raises(ServerDied, match=r"did not answer within 3 s\n(.*\n)*still loading"), server:
        pass
    assert server.log().count("child ") == 1
    assert not left(children_in(server.log()))
    assert seen[-1][1] == "still loading"
    assert [seconds for seconds, _ in seen] == sorted(seconds for seconds, _ in seen)


def test_an_error_while_waiting_leaves_nothing(start) -> None:
    """Ctrl-C before the server is up, say."""

    def interrupt(seconds: float, line: str) -> None:
        if line.startswith("no --log"):
            raise KeyboardInterrupt

    server = start("--silent", "--children", "1", on_wait=interrupt)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert not server.alive()
    assert not left(children_in(server.log()))


def test_a_server_that_died_later_is_said_to_have_died(start) -> None:
    with start("--log", "before the end") as server:
        server.processes()[0].kill()
        while server.alive():
            time.sleep(0.05)
        with pytest.raises(ServerDied, match=r"ended while answering /server_info\n(.*\n)*before the end"):
            server.info()


@pytest.mark.parametrize(
    ("number", "args"),
    [(signal.SIGINT, ["--outlive", "--own-session"]), (signal.SIGTERM, []), (signal.SIGKILL, [])],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_parent_that_is_signalled_leaves_nothing(number: signal.Signals, args: list[str], program: str) -> None:
    """Ctrl-C cleans up; where the parent has no chance to, the kernel ends the launcher and its children follow."""
    command = [sys.executable, "-c", PARENT, program, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        family = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.send_signal(number)
        try:
            assert parent.wait(timeout=30) != 0
        finally:
            parent.kill()
    remaining = left(family)
    for process in remaining:
        process.kill()
    assert len(family) == 3
    assert not remaining


def test_the_command_is_sglang_serve_on_a_port_of_its_own() -> None:
    first, second = SglangServer("m", ["--tp", "2"]), SglangServer("m")
    assert first.command[0] == sys.executable
    assert "sglang.cli.main" in first.command[2]
    assert first.command[3:6] == ["serve", "--model-path", "m"]
    assert first.command[-2:] == ["--tp", "2"]
    assert first.command[first.command.index("--port") + 1] == str(first.port) != str(second.port)
    assert first.url == f"http://127.0.0.1:{first.port}"
