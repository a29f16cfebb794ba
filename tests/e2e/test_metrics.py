"""/metrics of a real server after requests of known lengths, and `sglang-sm120 status` on it."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_sm120.cli import main
from sglang_sm120.integration.metrics import CALLS, EXPERT_BATCHES, EXPERTS, SELFCHECK, TOKENS
from sglang_sm120.testing.server import SglangServer
from tests.e2e.conftest import PROMPTS, SERVER_ARGS

pytestmark = pytest.mark.e2e

# One request at a time, no prefix shared, and no step launched ahead of a result: so each length says what ran.
EXACT = ["--disable-radix-cache", "--disable-overlap-schedule"]
ARGS = [*SERVER_ARGS, *EXACT, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a16"]
ENV = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # /health would run a token through the model
LAYERS, NEW_TOKENS = 2, 6
TOP_K, EXPERTS_OF_A_LAYER = 2, 8
OWN_LABELS = {"runner", "numerics", "phase", "result"}


def scrape(server: SglangServer) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Series name -> (labels, value) of each sample, for SGLang's series and ours."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics", follow_redirects=True).text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def test_counters_are_what_the_requests_imply(checkpoints, capsys) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    with SglangServer(nvfp4, [*ARGS, "--enable-metrics"], env=ENV) as server:
        before = scrape(server)
        assert CALLS not in before, "nothing ran yet"
        for prompt in PROMPTS:
            assert len(server.generate(prompt, max_new_tokens=NEW_TOKENS)["output_ids"]) == NEW_TOKENS
        after = scrape(server)

        # A prompt is one forward pass, which gives the first new token; each later one is a pass of one token. The
        # last new token is never fed back.
        steps = len(PROMPTS) * (NEW_TOKENS - 1)
        expected = {
            TOKENS: {"prefill": sum(map(len, PROMPTS)), "decode": steps},
            CALLS: {"prefill": LAYERS * len(PROMPTS), "decode": LAYERS * steps},
        }
        for name, phases in expected.items():
            assert {labels["phase"]: value for labels, value in after[name]} == phases, name
            assert all((labels["runner"], labels["numerics"]) == ("reference", "w4a16") for labels, _ in after[name])
        ((sglangs, _),) = after["sglang:num_running_reqs"]
        for name in (CALLS, TOKENS, SELFCHECK):
            for labels, _ in after[name]:
                rank = {key: value for key, value in labels.items() if key not in OWN_LABELS}
                assert rank == sglangs, f"{name} has the labels of SGLang's own collectors"

        assert main(["status", server.url, "--json"]) == 0
        rows = {row["phase"]: row for row in json.loads(capsys.readouterr().out)["runners"]}
        assert {phase: row["tokens"] for phase, row in rows.items()} == expected[TOKENS]
        assert {phase: row["calls"] for phase, row in rows.items()} == expected[CALLS]
        assert main(["status", server.url]) == 0
        assert re.search(rf"reference\W+w4a16\W+decode\W+{LAYERS * steps}\W+{steps}\W", capsys.readouterr().out)

        # The sums come once a second, with a later pass.
        for _ in range(2):
            time.sleep(1.1)
            server.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
        touched = {labels["rows_le"]: value for labels, value in scrape(server)[EXPERTS]}
        batches = {labels["rows_le"]: value for labels, value in scrape(server)[EXPERT_BATCHES]}
        assert batches["1"] >= steps and touched["1"] == TOP_K * batches["1"], "one token touches its own experts"
        assert batches["8"] >= 1 and TOP_K <= touched["8"] / batches["8"] <= EXPERTS_OF_A_LAYER
        assert main(["status", server.url, "--json"]) == 0
        shown = {row["rows_le"]: row for row in json.loads(capsys.readouterr().out)["experts"]}
        assert shown[1]["experts"] == TOP_K and shown[8]["batches"] == batches["8"]
        assert main(["status", server.url]) == 0
        assert re.search(rf"1\W+{int(batches['1'])}\W+2\.0\W", capsys.readouterr().out)


def test_without_enable_metrics_there_is_nothing_and_no_error(checkpoints, capsys) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    with SglangServer(nvfp4, ARGS) as server:
        assert len(server.generate(PROMPTS[0], max_new_tokens=2)["output_ids"]) == 2
        assert "sm120_moe" not in httpx.get(server.url + "/metrics", follow_redirects=True).text
        assert "integration/metrics.py" not in server.log(), "no traceback of ours"
        assert main(["status", server.url]) == 1
        assert "start it with --enable-metrics" in capsys.readouterr().err
