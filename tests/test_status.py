"""`sglang-sm120 status` against servers that answer well, badly, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_sm120 import status
from sglang_sm120.cli import main

INFO = {
    "model_path": "/models/m", "served_model_name": "m", "version": "0.5.23", "enable_sm120_opts": True,
    "sm120_moe_backend": "auto", "tp_size": 1,
}  # fmt: skip


def series(name: str, value: float, **labels: str) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"sglang:sm120_{name}{{{inside}}} {value}\n"


def served(runner: str, numerics: str, phase: str, calls: int, tokens: int, **rank: str) -> str:
    own = {"runner": runner, "numerics": numerics, "phase": phase, **rank}
    return series("moe_calls_total", calls, **own) + series("moe_tokens_total", tokens, **own)


METRICS = (
    'sglang:num_running_reqs{tp_rank="0"} 3.0\n'
    + served("native", "w4a16", "decode", 400, 30, tp_rank="0")
    + served("flashinfer_cutlass", "w4a4", "prefill", 20, 90, tp_rank="0")
    + series("moe_fallbacks_total", 2, reason="no [/red] markup", tp_rank="0")
    + series("moe_distinct_experts_total", 25, rows_le="4", tp_rank="0")
    + series("moe_distinct_experts_batches_total", 10, rows_le="4", tp_rank="0")
    + series("moe_distinct_experts_total", 16, rows_le="1", tp_rank="0")
    + series("moe_distinct_experts_batches_total", 2, rows_le="1", tp_rank="0")
    + series("moe_selfcheck", 1, runner="native", numerics="w4a16", result="passed")
    + series("moe_selfcheck", 0, runner="native", numerics="w4a16", result="failed")
)

Answer = tuple[int, str, str]
JSON, TEXT, HTML = "application/json", "text/plain; version=0.0.4", "text/html"
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """(path -> (status, content type, body)) -> URL of a server that answers so, and 404 elsewhere."""
    servers = []

    def start(answers: dict[str, Answer], *, key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, kind, body = answers.get(self.path, (404, JSON, '{"detail":"Not Found"}'))
                if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                    code, kind, body = 401, JSON, '{"error":"Unauthorized"}'
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def good(metrics: str = METRICS, **info: object) -> dict[str, Answer]:
    return {"/server_info": (200, JSON, json.dumps({**INFO, **info})), "/metrics": (200, TEXT, metrics)}


def test_tables(serve: Serve, capsys) -> None:
    assert main(["status", serve(good()) + "/"]) == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "--sm120-moe-backend auto" in lines
    assert "flashinfer_cutlass w4a4 prefill 20 90 75.0%" in lines
    assert "native w4a16 decode 400 30 25.0%" in lines
    assert "no [/red] markup 2" in lines, "a reason is text, not markup"
    assert "native w4a16 passed" in lines


def test_json(serve: Serve, capsys) -> None:
    url = serve(good())
    assert main(["status", url.removeprefix("http://"), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "url": url,
        "model": "m",
        "sglang_version": "0.5.23",
        "options": {"enable_sm120_opts": True, "sm120_moe_backend": "auto"},
        "runners": [
            {"runner": "flashinfer_cutlass", "numerics": "w4a4", "phase": "prefill", "calls": 20, "tokens": 90,
             "share": 0.75},
            {"runner": "native", "numerics": "w4a16", "phase": "decode", "calls": 400, "tokens": 30, "share": 0.25},
        ],
        "fallbacks": {"no [/red] markup": 2},
        "selfchecks": {"native w4a16": "passed"},
        "experts": [
            {"rows_le": 1, "batches": 2, "experts": 8.0},
            {"rows_le": 4, "batches": 10, "experts": 2.5},
        ],
    }  # fmt: skip


def test_before_the_first_request(serve: Serve, capsys) -> None:
    assert main(["status", serve(good('sglang:num_running_reqs{tp_rank="0"} 0.0\n'))]) == 0
    out = capsys.readouterr().out
    assert "no forward pass yet" in out
    assert "no fallback" in out


def test_ranks_are_added_up_once(serve: Serve) -> None:
    """Two data-parallel groups of two ranks each, in two pipeline stages."""
    text = ""
    for group, tokens in (("0", 10), ("1", 7)):
        for stage, layers in (("0", 3), ("1", 2)):
            for rank in "01":
                place = {"dp_rank": group, "pp_rank": stage, "tp_rank": rank}
                text += served("native", "w4a16", "decode", tokens * layers, tokens, **place)
                failed = float(group + stage + rank == "111")
                text += series("moe_selfcheck", failed, runner="native", numerics="w4a16", result="failed", **place)
                text += series("moe_selfcheck", 1 - failed, runner="native", numerics="w4a16", result="passed", **place)
    found = status.fetch(serve(good(text)))
    assert found.runners == [status.RunnerRow("native", "w4a16", "decode", 17 * 5, 17, 1.0)]
    assert found.selfchecks == {"native w4a16": "failed"}, "failed on one rank is failed"


def test_an_api_key(serve: Serve, capsys) -> None:
    url = serve(good(), key="secret")
    assert main(["status", url, "--api-key", "secret"]) == 0
    assert main(["status", url]) == 1
    assert "fix:    pass --api-key KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "found", "fix"),
    [
        ({"/server_info": (200, HTML, "<html></html>")}, "is not an SGLang server (/server_info answers 200, ",
         "check host and port"),
        ({}, "is not an SGLang server (/server_info answers 404", "check host and port"),
        ({"/server_info": (200, JSON, '["a list"]')}, "is not an SGLang server", "check host and port"),
        ({"/server_info": good()["/server_info"]}, "/metrics answers 404", "start it with --enable-metrics"),
        ({**good(), "/metrics": (200, HTML, "<html>\n<p>hello</p>")}, "is not in the format of Prometheus",
         "ask the server itself"),
        (good(enable_sm120_opts=False), "runs without this package", "--enable-sm120-opts --enable-metrics"),
        ({"/server_info": (200, JSON, '{"model_path": "m"}')}, "runs without this package", "--enable-sm120-opts"),
    ],
)  # fmt: skip
def test_errors(answers: dict[str, Answer], found: str, fix: str, serve: Serve, capsys) -> None:
    assert main(["status", serve(answers)]) == 1
    first, needed, last = capsys.readouterr().err.splitlines()
    assert found in first
    assert needed.startswith("  needed: ")
    assert last.startswith("  fix:    ")
    assert fix in last


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "ftp://127.0.0.1", "http://[", "http://a b"])
def test_nothing_there(url: str, capsys) -> None:
    assert main(["status", url]) == 1
    assert "sglang-sm120: cannot reach " in capsys.readouterr().err


def test_no_answer_in_time(serve: Serve, monkeypatch, capsys) -> None:
    class Stuck(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            released.wait(20)

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stuck)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(status, "TIMEOUT_S", 0.2)
    try:
        assert main(["status", f"http://127.0.0.1:{server.server_port}"]) == 1
    finally:
        released.set()
        server.shutdown()
        server.server_close()
    assert "did not answer within" in capsys.readouterr().err


def test_without_prometheus_client(serve: Serve, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    assert main(["status", serve(good())]) == 1
    assert "fix:    pip install prometheus-client" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_watch_until_interrupted(arguments: list[str], serve: Serve, monkeypatch, capsys) -> None:
    answers = good()
    url = serve(answers)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        more = METRICS + served("reference", "w4a4", "decode", 2, 1000, tp_rank="0")
        answers["/metrics"] = (200, TEXT, more)

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert main(["status", url, "--watch", "2.5", *arguments]) == 0
    assert slept == [2.5, 2.5]
    out = capsys.readouterr().out
    if arguments:
        assert [sum(row["tokens"] for row in json.loads(line)["runners"]) for line in out.splitlines()] == [120, 1120]
    else:
        assert "reference" in out
        assert "tokens a second" in out


def test_the_command_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_sm120.status; print({'torch', 'sglang', 'prometheus_client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
