"""`sglang-sm120 status URL`: what a running server does with its MoE layers, from its /server_info and /metrics."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_sm120.errors import Sm120Error
from sglang_sm120.integration.metrics import CALLS, EXPERT_BATCHES, EXPERTS, FALLBACKS, SELFCHECK, SERIES, TOKENS

TIMEOUT_S = 10.0
"""For one answer. /server_info asks the scheduler, which answers between two forward passes."""

_START = "sglang serve MODEL --enable-sm120-opts --enable-metrics"


class StatusError(Sm120Error, RuntimeError):
    """The server cannot be reached, is not SGLang, or does not say what was asked for."""


@dataclass(frozen=True)
class RunnerRow:
    """What one runner served in one phase. share: of all tokens, 0 to 1."""

    runner: str
    numerics: str
    phase: str
    calls: int
    tokens: int
    share: float


@dataclass(frozen=True)
class ExpertsRow:
    """Batches of more than rows_le / 2 and up to rows_le rows in one MoE layer. experts: touched by one, the mean."""

    rows_le: int
    batches: int
    experts: float


@dataclass(frozen=True)
class Status:
    """A server at one moment. options: ours. fallbacks: reason -> times. selfchecks: "runner numerics" -> result."""

    url: str
    model: str
    sglang_version: str
    options: dict[str, Any]
    runners: list[RunnerRow] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    selfchecks: dict[str, str] = field(default_factory=dict)
    experts: list[ExpertsRow] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.runners)


def run(url: str, *, as_json: bool = False, watch_s: float | None = None, api_key: str | None = None) -> int:
    """Print the status, once or every `watch_s` seconds until Ctrl-C. Raises StatusError."""
    console = Console()

    def show(status: Status, rate: float | None = None) -> None:
        if as_json:
            console.out(json.dumps(asdict(status)), highlight=False)
        else:
            console.print(render(status, rate))

    status = fetch(url, api_key)
    if watch_s is None:
        show(status)
        return 0
    try:
        if as_json:
            _watch(url, api_key, status, watch_s, show)
        else:
            with Live(console=console, auto_refresh=False) as live:
                _watch(url, api_key, status, watch_s, lambda now, rate: live.update(render(now, rate), refresh=True))
    except KeyboardInterrupt:
        pass
    return 0


def _watch(
    url: str, api_key: str | None, status: Status, watch_s: float, show: Callable[[Status, float | None], None]
) -> None:
    """Does not return: ends by Ctrl-C, or by a StatusError when the server goes away."""
    rate = None
    asked = time.monotonic()
    while True:
        show(status, rate)
        time.sleep(watch_s)
        before, asked_before = status.tokens, asked
        status, asked = fetch(url, api_key), time.monotonic()
        rate = max(0, status.tokens - before) / (asked - asked_before)


def fetch(url: str, api_key: str | None = None) -> Status:
    """Ask a server. url: with or without http://. Raises: StatusError."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    info = _server_info(url, headers)
    if not info.get("enable_sm120_opts"):
        raise StatusError(
            f"the server at {url} runs without this package (/server_info does not show enable_sm120_opts)",
            "a server that was started with --enable-sm120-opts",
            f"start it with {_START}",
        )
    samples = _samples(url, headers)
    tokens = _total(samples, TOKENS)
    calls = _total(samples, CALLS, sum_stages=True)
    fallbacks = _total(samples, FALLBACKS, sum_stages=True)
    all_tokens = sum(tokens.values())
    return Status(
        url=url,
        model=str(info.get("served_model_name") or info["model_path"]),
        sglang_version=str(info.get("version", "unknown")),
        options={name: value for name, value in sorted(info.items()) if "sm120" in name},
        runners=[
            RunnerRow(runner, numerics, phase, round(calls[labels]), round(count), count / (all_tokens or 1))
            for labels, count in sorted(tokens.items(), key=lambda item: -item[1])
            for runner, numerics, phase in [labels]
        ],
        fallbacks={labels[0]: round(count) for labels, count in sorted(fallbacks.items())},
        selfchecks=_selfchecks(samples),
        experts=_experts(samples),
    )


def render(status: Status, tokens_per_s: float | None = None) -> Group:
    """The status for a terminal. tokens_per_s: since the last look, if there was one."""
    title = Text(f"{status.model} at {status.url}, SGLang {status.sglang_version}")
    about = Table(title=title, show_header=False)
    for name, value in status.options.items():
        about.add_row(f"--{name.replace('_', '-')}", Text(str(value)))
    runners = Table("runner", "numerics", "phase", title="MoE layers served by")
    for heading in ("layer calls", "tokens", "share"):
        runners.add_column(heading, justify="right")
    for row in status.runners:
        numbers = f"{row.calls:,}", f"{row.tokens:,}", f"{row.share:.1%}"
        runners.add_row(*map(Text, (row.runner, row.numerics, row.phase)), *numbers)
    if not status.runners:
        runners.caption = "no forward pass yet, or no MoE layer that the table serves"
    elif tokens_per_s is not None:
        runners.caption = f"{tokens_per_s:,.1f} tokens a second"
    checks = Table("runner", "self-check", title="Self-checks at start")
    for name, result in status.selfchecks.items():
        checks.add_row(Text(name), result, style="red" if result == "failed" else "")
    fallbacks = Table("reason", "times", title="Left to SGLang's path, or struck")
    for reason, count in status.fallbacks.items():
        fallbacks.add_row(Text(reason), str(count))  # never read as markup
    experts = Table("rows, at most", title="Experts of a rank that a batch touches in one layer")
    for heading in ("batches", "experts a batch"):
        experts.add_column(heading, justify="right")
    for touched in status.experts:
        experts.add_row(f"{touched.rows_le:,}", f"{touched.batches:,}", f"{touched.experts:.1f}")
    return Group(
        about,
        runners,
        *([experts] if status.experts else []),
        checks if status.selfchecks else "no self-check",
        fallbacks if status.fallbacks else "no fallback",
    )


Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Series name -> (labels, value) of each sample."""


def _get(url: str, path: str, headers: dict[str, str]) -> httpx.Response:
    try:
        response = httpx.get(url + path, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except httpx.TimeoutException as error:
        raise StatusError(
            f"{url}{path} did not answer within {TIMEOUT_S:.0f} s",
            "a server that is up and not stuck",
            "see its log; while it loads weights it does not answer",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StatusError(
            f"cannot reach {url} ({error})",
            "the address of a running server, as http://HOST:PORT",
            "check host and port (SGLang's default port is 30000), and that the server has finished starting",
        ) from error
    if response.status_code in (401, 403):
        raise StatusError(
            f"{url}{path} answers {response.status_code}",
            "the key that the server was started with",
            "pass --api-key KEY",
        )
    return response


def _server_info(url: str, headers: dict[str, str]) -> dict[str, Any]:
    response = _get(url, "/server_info", headers)
    try:
        info = response.json()
    except ValueError:
        info = None
    if response.status_code != 200 or not isinstance(info, dict) or "model_path" not in info:
        raise StatusError(
            f"{url} is not an SGLang server (/server_info answers {response.status_code}, "
            f"{response.headers.get('content-type', 'no content type')})",
            "the address of a running SGLang 0.5.23 server",
            f"check host and port; start one with {_START}",
        )
    return info


def _samples(url: str, headers: dict[str, str]) -> Samples:
    """Our series at /metrics."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise StatusError(
            "the package prometheus_client is not installed here",
            "prometheus_client, which SGLang requires, to read /metrics",
            "pip install prometheus-client",
        ) from error
    response = _get(url, "/metrics", headers)
    if response.status_code != 200:
        raise StatusError(
            f"{url}/metrics answers {response.status_code}",
            "a server that reports metrics",
            f"start it with --enable-metrics: {_START}",
        )
    samples: Samples = defaultdict(list)
    try:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except ValueError as error:
        raise StatusError(
            f"{url}/metrics is not in the format of Prometheus ({str(error)[:100]})",
            "SGLang's own /metrics",
            "ask the server itself, not a proxy that serves something else under this path",
        ) from error
    return samples


def _total(samples: Samples, name: str, *, sum_stages: bool = False) -> dict[tuple[str, ...], float]:
    """A counter over all ranks, by our own labels.

    The ranks of one data-parallel group and pipeline stage see the same batches: one of them speaks for all. Groups add
    up. Stages hold different layers, so calls add up and tokens do not.
    """
    by_stage: dict[tuple[str, ...], dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for labels, value in samples.get(name, ()):
        own = tuple(labels[label] for label in SERIES[name][1])
        place = labels.get("dp_rank", ""), labels.get("pp_rank", "")
        by_stage[own][place] = max(by_stage[own][place], value)
    totals = {}
    for own, places in by_stage.items():
        groups: dict[str, list[float]] = defaultdict(list)
        for (group, _stage), value in places.items():
            groups[group].append(value)
        totals[own] = sum((sum if sum_stages else max)(values) for values in groups.values())
    return totals


def _experts(samples: Samples) -> list[ExpertsRow]:
    """Over all ranks and groups that report: the mean over their batches."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for place, name in enumerate((EXPERTS, EXPERT_BATCHES)):
        for labels, value in samples.get(name, ()):
            sums[int(labels["rows_le"])][place] += value
    return [ExpertsRow(rows, round(n), total / n) for rows, (total, n) in sorted(sums.items()) if n]


def _selfchecks(samples: Samples) -> dict[str, str]:
    """Failed on one rank is failed."""
    results: dict[str, str] = {}
    for labels, value in sorted(samples.get(SELFCHECK, ()), key=lambda sample: sample[0]["result"] == "failed"):
        if value == 1:
            results[f"{labels['runner']} {labels['numerics']}"] = labels["result"]
    return results
