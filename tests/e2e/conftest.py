"""Real servers and real checkpoints for the end-to-end tests. Everything runs on the CPU, over HTTP on loopback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_sm120.testing.checkpoints import (
    ReferenceModel,
    dequantize_checkpoint,
    quantize_checkpoint,
    write_random_model,
)

PROMPTS = [
    [5, 9, 33, 77, 120, 44, 8],
    [200, 201, 3, 4, 90, 15, 16, 17, 18, 19, 20],
    [7] * 33,
]

ON_GPU = torch.cuda.is_available()

ATOL = 0.1 if ON_GPU else 1e-3
"""Bound on a log-probability's error, in nats. On the CPU everything is float32; SGLang's CUDA kernels take half
precision only, and float16 has the finer step. A wrong scale or expert is off by more than 1."""

# Small pools: the machine that runs the tests may have two cores and little memory.
SERVER_ARGS = [
    "--enable-sm120-opts", "--sm120-emulate", "--max-total-tokens", "4096", "--max-running-requests", "16",
    "--mem-fraction-static", "0.3", "--skip-server-warmup", "--dtype", "float16" if ON_GPU else "float32",
]  # fmt: skip
if ON_GPU:  # kernels that any CUDA GPU has, with CUDA graphs for decoding
    SERVER_ARGS += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    SERVER_ARGS += ["--cuda-graph-max-bs-decode", "4", "--disable-prefill-cuda-graph"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """(style, format) -> (NVFP4 checkpoint, the same dequantised for transformers), written once a session."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def get(style: str, fmt: str) -> tuple[Path, Path]:
        plain = root / style
        if not plain.exists():
            write_random_model(plain, style, gpu_attention=ON_GPU)
        nvfp4 = quantize_checkpoint(plain, root / f"{style}-{fmt}", fmt)
        return nvfp4, dequantize_checkpoint(nvfp4, root / f"{style}-{fmt}-plain")

    return get


def assert_same_tokens(
    answers: list[dict], reference: ReferenceModel, prompts: list[list[int]], *, atol: float = ATOL
) -> None:
    """Every generated token is the reference's greedy one, and its log-probability agrees.

    Where the reference's two best tokens are closer than `atol` the choice between them is not decided.
    """
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        assert len(tokens) == answer["meta_info"]["completion_tokens"] > 0
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        for position, (token, logprob, score) in enumerate(
            zip(tokens, logprobs, reference.score(prompt, tokens), strict=True)
        ):
            where = f"prompt {prompt[:3]}, token {position}"
            assert abs(logprob - score.logprob) <= atol, f"{where}: log-probability {logprob} against {score.logprob}"
            if token != score.argmax:
                assert score.argmax_logprob - score.logprob <= atol, f"{where}: {token} against {score.argmax}"
