"""Real servers with --sm120-l2: every token as without, what was planned in the log, what was fetched in /metrics."""

from __future__ import annotations

import re

import pytest

from sglang_sm120.integration.metrics import L2_BYTES
from sglang_sm120.testing.checkpoints import MODEL_STYLES, ReferenceModel
from sglang_sm120.testing.server import SglangServer
from tests.e2e.conftest import ON_GPU, PROMPTS, SERVER_ARGS, assert_same_tokens
from tests.e2e.test_metrics import ENV as QUIET
from tests.e2e.test_metrics import EXACT, scrape
from tests.e2e.test_refusals import refused

pytestmark = pytest.mark.e2e

ARGS = [*SERVER_ARGS, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a16"]
PLANNED = "sglang-sm120: L2 in decode graphs of up to 64 tokens: "
NEW_TOKENS = 6
LAYERS = {"qwen3_moe": 2, "glm4_moe": 3, "deepseek_v3": 3}


def planned(server: SglangServer) -> list[str]:
    return [line.removeprefix(PLANNED) for line in server.our_lines() if line.startswith(PLANNED)]


@pytest.mark.parametrize("style", MODEL_STYLES)
def test_prefetch_changes_no_token(style: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, "modelopt")
    args = [*ARGS, *EXACT, "--sm120-l2", "prefetch", "--sm120-l2-prefetch-mb", "16", "--enable-metrics"]
    with SglangServer(nvfp4, args, env=QUIET) as server:
        assert L2_BYTES not in scrape(server), "nothing ran yet"
        server.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
        ((_, fetched),) = scrape(server)[L2_BYTES]
        answers = server.generate(PROMPTS, max_new_tokens=16, return_logprob=True)
        assert_same_tokens(answers, ReferenceModel(plain), PROMPTS)
        lines = planned(server)
    total = 0.0
    for text, layers in (
        ("under attention: what comes behind it", LAYERS[style]),
        ("under the all-reduce behind attention: the FFN's dense weights", LAYERS[style]),
        ("under the all-reduce behind the FFN: the next layer's attention", LAYERS[style] - 1),
    ):
        seen = 0
        for line in lines:  # one for layers that are alike
            if found := re.match(rf"{re.escape(text)}, ([\d.]+) MB in layers? (\d+)(?: to (\d+))?: \w", line):
                count = int(found[3] or found[2]) - int(found[2]) + 1
                seen += count
                total += float(found[1]) * count
        assert seen == layers, lines
    a_step = fetched / (NEW_TOKENS - 1)
    assert a_step == int(a_step) > 0, "the same in every step of one token"
    assert abs(a_step / (1 << 20) - total) < 0.05 * 3 * LAYERS[style] + 0.01, "as planned, which is rounded to 0.1 MB"


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: windows are of its L2")
@pytest.mark.parametrize(("style", "mode"), [("glm4_moe", "persist"), ("glm4_moe", "both"), ("deepseek_v3", "both")])
def test_windows_change_no_token(style: str, mode: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, "modelopt")
    with SglangServer(nvfp4, [*ARGS, "--sm120-l2", mode, "--sm120-l2-persist-mb", "8"]) as server:
        answers = server.generate(PROMPTS, max_new_tokens=16, return_logprob=True)
        assert_same_tokens(answers, ReferenceModel(plain), PROMPTS)
        lines = planned(server)
    assert lines[-1].startswith("kept from step to step, ")
    assert "layers.0." in lines[-1] and (mode == "both") == (len(lines) > 1), lines


def test_what_cannot_be_served_stops_before_weights_load(checkpoints) -> None:
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    log = refused(nvfp4, [*ARGS, "--sm120-l2", "prefetch", "--enable-torch-compile"])
    assert "--sm120-l2 prefetch: --enable-torch-compile" in log and "or drop --sm120-l2" in log
    log = refused(nvfp4, [*ARGS, "--sm120-l2", "prefetch", "--sm120-l2-persist-mb", "4"])
    assert "--sm120-l2-persist-mb with --sm120-l2 prefetch" in log
