"""--fp4-gemm-backend flashinfer_b12x: what reaches mm_fp4, who may ask for it, and what stops it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.errors import UnsupportedError
from sglang_sm120.integration import fp4_gemm
from sglang_sm120.runners import handover
from tests.runners.contract_sources import find
from tests.runners.test_contracts import flashinfer_source  # noqa: F401

pytest.importorskip("sglang")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """(backend) -> SGLang's module after initialize ran for a server that was given this backend."""
    from sglang.srt.layers.quantization import fp4_utils

    monkeypatch.setattr(fp4_utils, "FP4_GEMM_RUNNER_BACKEND", None)
    original = fp4_utils.initialize_fp4_gemm_config

    def run(backend: str):
        config = SimpleNamespace(kernel=SimpleNamespace(fp4_gemm_runner_backend=backend))
        monkeypatch.setattr(fp4_utils, "get_exec", lambda: config)
        fp4_gemm.initialize(original)
        return fp4_utils

    return run


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """An SM120 machine with everything that is needed, for as long as the test runs."""
    from sglang.srt.runtime_context import override_platform

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fp4_gemm.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(handover, "flashinfer_reason", lambda: None)
    with override_platform(is_sm120=True, is_sm100=False):
        yield


def undecorated(module, name: str):
    """A function of the module without its decorators: as a torch operator it exists for CUDA only."""
    node = find(ast.parse(Path(module.__file__).read_text()), name)
    assert isinstance(node, ast.FunctionDef)
    node.decorator_list, node.returns = [], None
    exec(compile(ast.Module([node], []), module.__file__, "exec"), namespace := dict(vars(module)))
    return namespace[name]


def test_mm_fp4_is_told_b12x_and_all_else_is_as_for_cutlass(asked, machine, monkeypatch) -> None:
    fp4_utils = asked(fp4_gemm.BACKEND)
    ours, cutlass = fp4_utils.get_fp4_gemm_runner_backend(), fp4_utils.Fp4GemmRunnerBackend.FLASHINFER_CUTLASS
    assert ours.get_flashinfer_backend() == "b12x"
    assert ours.value == fp4_gemm.BACKEND
    questions = [name for name in vars(fp4_utils.Fp4GemmRunnerBackend) if name.startswith(("is_", "supports_"))]
    assert len(questions) >= 8
    assert {name: getattr(ours, name)() for name in questions} == {name: getattr(cutlass, name)() for name in questions}

    from sglang.srt.layers.quantization import modelopt_quant

    told = []
    monkeypatch.setattr(modelopt_quant, "enable_flashinfer_fp4_gemm", True)
    monkeypatch.setattr(
        modelopt_quant,
        "flashinfer_fp4_gemm",
        lambda *a, backend: told.append(backend) or torch.empty(2, 4),
        raising=False,
    )
    monkeypatch.setattr("sglang.kernels.ops.gemm.try_qwen3x_nvfp4_gemm", lambda *arguments: None, raising=False)
    byte = torch.zeros(2, 8, dtype=torch.uint8)
    undecorated(modelopt_quant, "fp4_gemm")(byte, byte, byte, byte, torch.ones(()), torch.float32, 4)
    assert told == ["b12x"]


@pytest.mark.parametrize("backend", ["auto", "flashinfer_cutlass", "flashinfer_cudnn", "marlin"])
def test_any_other_choice_is_sglangs(asked, machine, monkeypatch, backend: str) -> None:
    from sglang.srt.layers.quantization import fp4_utils

    monkeypatch.setattr(fp4_utils, "is_cuda", lambda: False)
    monkeypatch.setattr(fp4_gemm, "unavailable_reason", lambda: pytest.fail("nobody asked"))
    wanted = "flashinfer_cutlass" if backend == "auto" else backend
    assert asked(backend).get_fp4_gemm_runner_backend() is fp4_utils.Fp4GemmRunnerBackend(wanted)


@pytest.mark.parametrize("missing", ["gpu", "cuda", "dsl", "flashinfer"])
def test_what_is_missing_stops_the_server(asked, machine, monkeypatch, missing: str) -> None:
    from sglang.srt.runtime_context import override_platform

    if missing == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "12.8")
    elif missing == "dsl":
        monkeypatch.setattr(fp4_gemm.importlib.util, "find_spec", lambda name: None)
    elif missing == "flashinfer":
        monkeypatch.setattr(handover, "flashinfer_reason", lambda: "flashinfer-python 0.9 is not one that was checked")
    says = {"gpu": "this machine has", "cuda": "CUDA 12.8", "dsl": "cutlass-dsl", "flashinfer": "0.9"}[missing]
    with override_platform(is_sm120=missing != "gpu"), pytest.raises(UnsupportedError) as caught:
        asked(fp4_gemm.BACKEND)
    assert says in str(caught.value)
    assert "drop --fp4-gemm-backend" in caught.value.fix
    from sglang.srt.layers.quantization import fp4_utils

    assert fp4_utils.FP4_GEMM_RUNNER_BACKEND is None, "and nothing else was chosen"


@pytest.mark.parametrize("on", [True, False])
def test_the_parser_takes_the_name_only_where_we_were_asked_for(on: bool) -> None:
    code = (
        "import argparse, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins(); load_plugins()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)\n"
        "print(parser.parse_args(sys.argv[1:]).fp4_gemm_runner_backend)\n"
    )
    flags = ["--model-path", "m", "--fp4-gemm-backend", fp4_gemm.BACKEND, *(["--enable-sm120-opts"] if on else [])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *flags], capture_output=True, text=True, timeout=240
    )
    if on:
        assert done.stdout.strip().splitlines()[-1:] == [fp4_gemm.BACKEND], done.stderr[-2000:]
    else:
        assert done.returncode == 2
        assert "invalid choice: 'flashinfer_b12x'" in done.stderr


def test_flashinfer_has_the_backend_for_these_gpus_and_cuda(flashinfer_source) -> None:  # noqa: F811
    file = flashinfer_source / "flashinfer/gemm/gemm_base.py"
    text = file.read_text()
    tree = ast.parse(text)
    mm_fp4 = find(tree, "mm_fp4")
    assert isinstance(mm_fp4, ast.FunctionDef)
    (backend,) = [argument for argument in mm_fp4.args.args if argument.arg == "backend"]
    assert "'b12x'" in ast.unparse(backend.annotation)
    requirement = find(tree, "_b12x_gemm_fp4_requirement")
    assert isinstance(requirement, ast.FunctionDef)
    assert ast.unparse(requirement.decorator_list[0]) == "supported_compute_capability([120, 121])"
    assert "real_k % 32 != 0" in ast.unparse(requirement)  # SGLang pads K to that
    assert f'_MIN_B12X_CUDA_VERSION = Version("{".".join(map(str, fp4_gemm.MIN_CUDA))}")' in text


def test_sglang_pads_k_to_what_the_kernel_needs() -> None:
    from sglang.srt.layers.quantization.modelopt_quant import FP4_GEMM_ALIGNMENT

    assert FP4_GEMM_ALIGNMENT % 32 == 0
