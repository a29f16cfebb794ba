"""Real SGLang, real HTTP, our MoE runner; every token compared with transformers on the dequantised checkpoint."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import psutil
import pytest
import torch

from sglang_sm120.testing.checkpoints import (
    MODEL_STYLES,
    ReferenceModel,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from sglang_sm120.testing.server import ServerDied, SglangServer
from tests.e2e.conftest import ATOL, ON_GPU, PROMPTS, SERVER_ARGS, assert_same_tokens

pytestmark = pytest.mark.e2e

ENGINE_ARGS = (
    {"dtype": "float16", "attention_backend": "triton", "sampling_backend": "pytorch"}
    if ON_GPU
    else {"dtype": "float32"}
)
W4A16 = [*SERVER_ARGS, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a16"]
W4A4 = [*SERVER_ARGS, "--sm120-moe-backend", "reference", "--sm120-moe-numerics", "w4a4"]
TAKEN = "sglang-sm120: MoE runners of 2 of 2 layers of the model: reference w4a16 for every batch"
AUTO_TAKEN = TAKEN.replace("reference", "native") if ON_GPU else TAKEN  # on the CPU our kernels are for tests


def taken(lines: list[str], what: str = TAKEN) -> int:
    return sum(line.startswith(what) for line in lines)


def _compare(server: SglangServer, reference: ReferenceModel, *, atol: float = ATOL) -> None:
    answers = server.generate(PROMPTS, max_new_tokens=16, return_logprob=True)
    assert_same_tokens(answers, reference, PROMPTS, atol=atol)


@pytest.mark.parametrize("fmt", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("style", MODEL_STYLES)
def test_every_style_and_format(style: str, fmt: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, fmt)
    with SglangServer(nvfp4, W4A16) as server:
        _compare(server, ReferenceModel(plain))
        assert taken(server.our_lines()) == 1


@pytest.mark.parametrize(("style", "fmt"), [("qwen3_moe", "modelopt"), ("glm4_moe", "compressed-tensors")])
def test_quantised_activations(style: str, fmt: str, checkpoints) -> None:
    nvfp4, plain = checkpoints(style, fmt)
    with SglangServer(nvfp4, W4A4) as server:
        # An activation next to a rounding boundary may fall either way, so the log-probabilities are looser here.
        _compare(server, ReferenceModel(plain, w4a4=True), atol=max(ATOL, 0.05))


def test_a_weight_only_checkpoint_is_served_in_w4a16(checkpoints, tmp_path) -> None:
    """SGLang fills its missing activation scales with 1.0; quantising under them would be wrong without a word."""
    nvfp4, _ = checkpoints("qwen3_moe", "modelopt")
    weight_only = quantize_checkpoint(nvfp4.parent / "qwen3_moe", tmp_path / "w4a16", "modelopt", w4a16_only=True)
    plain = dequantize_checkpoint(weight_only, tmp_path / "plain")
    with SglangServer(weight_only, [*SERVER_ARGS, "--sm120-moe-backend", "reference"]) as server:
        assert server.info()["sm120_moe_numerics"] == "w4a16"
        assert taken(server.our_lines()) == 1
        _compare(server, ReferenceModel(plain))


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none")
@pytest.mark.parametrize(
    ("style", "fmt", "parallel"),
    [
        ("qwen3_moe", "modelopt", ["--tp", "2"]),
        ("glm4_moe", "modelopt", ["--tp", "2", "--ep", "2"]),
        ("qwen3_moe", "compressed-tensors", ["--tp", "2", "--ep", "2"]),
    ],
)
def test_two_ranks(style: str, fmt: str, parallel: list[str], checkpoints) -> None:
    nvfp4, plain = checkpoints(style, fmt)
    with SglangServer(nvfp4, [*W4A16, *parallel], env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}) as server:
        _compare(server, ReferenceModel(plain))
        assert taken(server.our_lines()) == 2, "each rank takes its layers"


def test_options_reach_every_process_and_server_info(checkpoints, tmp_path) -> None:
    """A --config file, python -m sglang.launch_server, and the default runner under emulation."""
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    config = tmp_path / "server.yaml"
    config.write_text("enable-sm120-opts: true\nsm120-emulate: true\nsm120-moe-numerics: w4a16\n")
    rest = SERVER_ARGS[2:]
    with SglangServer(nvfp4, ["--config", str(config), *rest], launcher=["-m", "sglang.launch_server"]) as server:
        info = server.info()
        assert {name: value for name, value in info.items() if "sm120" in name} == {
            "enable_sm120_opts": True,
            "sm120_moe_backend": "auto",
            "sm120_moe_numerics": "w4a16",
            "sm120_moe_profile": "",
            "sm120_all_reduce": "auto",
            "sm120_all_reduce_profile": "",
            "sm120_l2": "off",
            "sm120_l2_prefetch_mb": "",
            "sm120_l2_persist_mb": "",
            "sm120_verify": "auto",
            "sm120_emulate": True,
        }
        assert info["moe_runner_backend"] == "flashinfer_cutlass", "field report 29"
        _compare(server, ReferenceModel(plain))
        assert taken(server.our_lines(), AUTO_TAKEN) == 1


def test_clients_streaming_abort_and_restart(checkpoints) -> None:
    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    reference = ReferenceModel(plain)
    with SglangServer(nvfp4, W4A16) as server:
        answers: list = [None, None]

        def ask(client: int) -> None:
            answers[client] = server.generate(PROMPTS[client], max_new_tokens=24, return_logprob=True)

        clients = [threading.Thread(target=ask, args=(client,)) for client in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert_same_tokens(answers, reference, PROMPTS[:2])
        alone = server.generate(PROMPTS[0], max_new_tokens=24)["output_ids"]
        assert _stream(server, PROMPTS[0], 24) == alone

        _abort_in_flight(server)
        after = server.generate(PROMPTS[0], max_new_tokens=24)
        assert after["output_ids"] == alone, "an aborted request leaves nothing behind"

        # Kill a scheduler as the kernel's out-of-memory killer would: the server ends, and says so.
        victims = [p for p in server.processes() if "scheduler" in " ".join(p.cmdline() or [p.name()])]
        assert victims, [p.cmdline() for p in server.processes()]
        family = server.processes()
        victims[0].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 60
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not server.alive(), "a server without its scheduler must end"
        with pytest.raises(ServerDied):
            server.generate(PROMPTS[0])
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left, left
    with SglangServer(nvfp4, W4A16) as server:  # nothing of the first start is in the way
        assert server.generate(PROMPTS[0], max_new_tokens=24)["output_ids"] == alone


def _stream(server: SglangServer, prompt: list[int], new_tokens: int) -> list[int]:
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    tokens: list[int] = []
    chunks = 0
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                tokens, chunks = json.loads(line[6:])["output_ids"], chunks + 1
    assert chunks > 1, "streaming sends more than one chunk"
    return tokens


def _abort_in_flight(server: SglangServer) -> None:
    request_id = "to-be-aborted"
    answer: dict = {}

    def ask() -> None:
        answer.update(server.generate(PROMPTS[2], max_new_tokens=450, rid=request_id))

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(1.0)
    httpx.post(server.url + "/abort_request", json={"rid": request_id}, timeout=30).raise_for_status()
    client.join(timeout=60)
    assert not client.is_alive()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort", answer["meta_info"]


def test_engine_keywords(checkpoints, tmp_path) -> None:
    """sglang.Engine(enable_sm120_opts=True), in a program of its own."""
    import subprocess
    import sys

    nvfp4, plain = checkpoints("qwen3_moe", "modelopt")
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "if __name__ == '__main__':\n"
        "    import sglang\n"
        f"    engine = sglang.Engine(model_path={str(nvfp4)!r}, enable_sm120_opts=True, sm120_emulate=True,\n"
        "        sm120_moe_numerics='w4a16', max_total_tokens=2048, mem_fraction_static=0.3,\n"
        f"        skip_server_warmup=True, log_level='info', **{ENGINE_ARGS!r})\n"
        f"    out = engine.generate(input_ids=[{PROMPTS[0]}],\n"
        "        sampling_params={'temperature': 0, 'max_new_tokens': 8, 'ignore_eos': True}, return_logprob=True)\n"
        "    print('ANSWER', json.dumps(out[0]))\n"
        "    engine.shutdown()\n"
    )
    # The platform is chosen when sglang is imported, before any keyword: on the CPU the variable has to say it.
    env = {**os.environ, "SGLANG_SM120_EMULATE": "1", "SGLANG_SM120_ENABLE": "1"}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=240, env=env)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stdout[-2000:] + done.stderr[-4000:]
    assert_same_tokens([json.loads(answers[0][7:])], ReferenceModel(plain), PROMPTS[:1])
    assert AUTO_TAKEN in done.stdout + done.stderr
