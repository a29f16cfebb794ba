"""The grouped GEMM: its cases in a process of their own, its contract, its tiles, and its compiled code."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from grouped_gemm_prefill_cases import DEVICE, activations, poisoned, problem, schedule_of, weights_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_sm120.errors import ContractError, UnsupportedError
from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation
from sglang_sm120.kernels.moe.grouped_gemm_prefill import api, kernel
from sglang_sm120.kernels.moe.grouped_gemm_prefill.config import (
    BLOCK_ROWS,
    CANDIDATES,
    GemmConfig,
    choose,
    choose_block_rows,
    choose_for_block_rows,
    fits,
    programs_per_sm,
    shared_memory_bound,
)

ROOT = Path(__file__).resolve().parents[3]
CASES = "tests/kernels/moe/grouped_gemm_prefill_cases.py"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SM120, SM90 = (12, 0), (9, 0)

# Experts, top k, N and K of both GEMMs of a rank: I = 256, 384, 256 and 352.
MODELS = {
    "GLM-5 TP8": (256, 8, [(512, 6144), (6144, 256)]),
    "Qwen3-235B TP4": (128, 8, [(768, 4096), (4096, 384)]),
    "DeepSeek-V3 TP8": (256, 8, [(512, 7168), (7168, 256)]),
    "odd": (32, 4, [(704, 2880), (2880, 352)]),
}


def interpreter_works() -> bool:
    """Before 3.8 it makes Python numbers of arrays with one element, which later releases of NumPy refuse."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8):
        return True
    try:
        int(np.ones(1))
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("interpret", ["1", "0"], ids=["interpreted", "as it is"])
def test_cases(interpret) -> None:
    """As it is: the kernel on a GPU, plain torch on a CPU."""
    if interpret == "1" and not interpreter_works():
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not work with NumPy {np.__version__}")
    environment = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", CASES],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 90


# The contract


def arguments(**changes) -> dict:
    p = problem([3, 0, 5], 64, 96)
    a, a_scale, _ = activations(p.num_slots, p.k, "w4a4", torch.float32)
    weight, blockscale, alpha = weights_of(p)
    good = {
        "a": a, "weight": weight, "blockscale": blockscale, "alpha": alpha, "schedule": schedule_of(p, 16),
        "out": poisoned(p.num_slots, p.n), "a_scale": a_scale,
    }  # fmt: skip
    changed = {name: change(good) if callable(change) else change for name, change in changes.items()}
    return good | {name: c.to(DEVICE) if isinstance(c, torch.Tensor) else c for name, c in changed.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": lambda a: a["weight"][:, :32]}, "weight has strides"),
        ({"weight": lambda a: a["weight"][:2]}, "blockscale is"),
        ({"weight": lambda a: a["weight"][0]}, "2 dimensions"),
        ({"weight": lambda a: a["weight"].view(torch.int8)}, "weight is torch.int8"),
        ({"blockscale": lambda a: a["blockscale"][:, :64]}, "blockscale is"),
        ({"blockscale": lambda a: a["blockscale"].view(torch.uint8)}, "blockscale is torch.uint8"),
        ({"blockscale": lambda a: a["blockscale"].mT.contiguous().mT}, "blockscale has strides"),
        ({"alpha": lambda a: a["alpha"][:2]}, "alpha is"),
        ({"alpha": lambda a: a["alpha"].double()}, "alpha is torch.float64"),
        ({"a": lambda a: a["a"][:, :40]}, "a is"),
        ({"a_scale": lambda a: a["a_scale"][1:]}, "a_scale is"),
        ({"a_scale": None}, "a_scale is None"),
        ({"a_scale": None, "a": torch.zeros(11, 48)}, "a is torch.float32"),
        ({"out": torch.zeros(11, 32)}, "out is"),
        ({"out": torch.zeros(64, 11).T}, "out has strides"),
        ({"out": torch.zeros(11, 64), "is_gated": True, "activation": MoeActivation()}, "out is"),
        ({"w13_order": "gate"}, "w13_order"),
        ({"a_div": 0}, "a_div 0"),
        ({"a_rows": "token"}, "a_rows is 'token'"),
        ({"a_rows": "sorted"}, "a has 11 rows, and sorted_slots 64"),
        ({"out_rows": "sorted"}, "out has 11 rows, and sorted_slots 64"),
        ({"a_rows": "sorted", "a": torch.zeros(64, 96), "a_scale": None, "a_div": 2}, "a_div 2 with sorted rows"),
        ({"router_weights": torch.ones(10)}, "router_weights is"),
        ({"router_weights": torch.ones(11).half()}, "router_weights is torch.float16"),
        ({"tickets": torch.zeros(2)}, "tickets is torch.float32"),
        ({"tickets": torch.zeros(1, dtype=torch.int32)}, "tickets is"),
        (
            {"schedule": lambda a: dataclasses.replace(a["schedule"], expert_rows=a["schedule"].expert_rows[:2])},
            "schedule.expert_rows is",
        ),
        (
            {"schedule": lambda a: dataclasses.replace(a["schedule"], sorted_slots=a["schedule"].sorted_slots.long())},
            "schedule.sorted_slots is torch.int64",
        ),
    ],
)
def test_contradictions_are_refused(changes, message) -> None:
    api.grouped_gemm_prefill(**arguments())
    with pytest.raises(ContractError, match=message):
        api.grouped_gemm_prefill(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_dtype": torch.float64}, "A of torch.float64"),
        ({"out_dtype": torch.uint8}, "out of torch.uint8"),
        ({"k": 72}, "K is 72"),
        ({"k": 0}, "K is 0"),
        ({"n": 2**20, "k": 2**12}, "2\\*\\*31 bytes"),
        ({"is_gated": True}, "without an activation"),
        ({"is_gated": True, "activation": MoeActivation("relu2")}, "'relu2' of a gated"),
        ({"activation": MoeActivation("tanh")}, "'tanh' of an ungated"),
        ({"activation": MoeActivation("silu", limit=7.0)}, "clamp limit"),
        ({"device": torch.device("meta")}, "device meta"),
    ],
)
def test_unsupported_reason(changes, message) -> None:
    good = {"n": 64, "k": 96, "a_dtype": torch.uint8, "out_dtype": torch.bfloat16, "device": torch.device("cpu")}
    assert INTERPRETED or api.unsupported_reason(**good) is None
    assert re.search(message, api.unsupported_reason(**(good | changes)) or "")


def test_unsupported_is_raised() -> None:
    with pytest.raises(UnsupportedError, match="without an activation"):
        api.grouped_gemm_prefill(**arguments(is_gated=True, out=torch.zeros(11, 32)))


# The tiles


def test_chosen_tiles() -> None:
    """Pinned, so that a change of the rules shows."""
    chosen = {
        (model, tokens, numerics): [
            dataclasses.astuple(choose(tokens, top_k, experts, n, k, numerics=numerics, capability=SM120))
            for n, k in gemms
        ]
        for model, (experts, top_k, gemms) in MODELS.items()
        for tokens in (64, 1024, 8192)
        for numerics in CANDIDATES
    }
    for model in ("GLM-5 TP8", "DeepSeek-V3 TP8"):
        assert chosen[model, 64, "w4a4"] == [(16, 64, 256, 2, 3), (16, 128, 128, 4, 4)]
        assert chosen[model, 1024, "w4a4"] == [(32, 128, 256, 4, 3), (32, 128, 128, 2, 4)]
        assert chosen[model, 8192, "w4a4"] == [(128, 128, 256, 8, 3), (128, 128, 128, 8, 4)]
        assert chosen[model, 8192, "w4a16"] == [(128, 128, 64, 8, 3)] * 2
    assert chosen["Qwen3-235B TP4", 1024, "w4a4"] == [(64, 128, 128, 4, 4)] * 2
    assert chosen["Qwen3-235B TP4", 1024, "w4a16"] == [(64, 128, 64, 4, 3)] * 2
    assert chosen["odd", 64, "w4a16"] == [(16, 128, 64, 4, 4)] * 2
    assert chosen["odd", 8192, "w4a4"] == [(128, 128, 128, 8, 4)] * 2


def test_block_rows_follow_the_mean_rows_of_an_expert() -> None:
    assert [choose_block_rows(tokens, 8, 256) for tokens in (0, 1, 512, 513, 1024, 1025, 2049, 10**6)] == [
        16, 16, 16, 32, 32, 64, 128, 128,
    ]  # fmt: skip


@pytest.mark.parametrize("capability", [SM120, (12, 1), SM90, (8, 9), (0, 0)], ids=str)
@pytest.mark.parametrize("numerics", CANDIDATES)
def test_there_is_a_tile_for_everything(numerics, capability) -> None:
    for block_rows in BLOCK_ROWS:
        for n in (2, 32, 80, 160, 704, 6144):
            for k in (16, 80, 256, 352, 7168):
                more = {"numerics": numerics, "capability": capability}
                config = choose_for_block_rows(block_rows, n, k, **more)
                assert config.block_rows == block_rows
                assert fits(config, **more)
                assert programs_per_sm(config, **more) >= 1


def test_no_tile_of_these_rows() -> None:
    with pytest.raises(UnsupportedError, match="24 rows"):
        choose_for_block_rows(24, 64, 64, numerics="w4a4", capability=SM120)


def test_the_limit_of_a_block() -> None:
    """101,376 bytes on 12.x: one more stage is refused where it does not fit."""
    config = GemmConfig(128, 128, 256, 8, 3)
    assert fits(config, numerics="w4a4", capability=SM120)
    assert not fits(dataclasses.replace(config, num_stages=4), numerics="w4a4", capability=SM120)
    assert fits(dataclasses.replace(config, num_stages=4), numerics="w4a4", capability=SM90)


# Compiled code, without a GPU

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    "a_ptr": "*u8", "a_scale_ptr": "*u8", "weight_ptr": "*u8", "weight_scale_ptr": "*u8", "alpha_ptr": "*fp32",
    "out_ptr": "*bf16", "sorted_slots_ptr": "*i32", "block_expert_ptr": "*i32", "expert_first_block_ptr": "*i32",
    "expert_rows_ptr": "*i32", "num_blocks_ptr": "*i32", "ticket_ptr": "*i32", "router_weight_ptr": "*fp32",
}  # fmt: skip
ALIGNED = ("a_ptr", "a_scale_ptr", "weight_ptr", "weight_scale_ptr", "out_ptr")
COMPILES = pytest.mark.skipif(INTERPRETED, reason="Triton is the interpreter in this process")


@dataclasses.dataclass
class Compiled:
    shared: int
    stack: int
    local: int
    registers: int
    sass: str


def compiled(config: GemmConfig, n: int, k: int, *, numerics: str, capability: tuple[int, int]) -> Compiled:
    """As the api launches it: the first GEMM of a gated layer when N is the smaller, else the second, with tickets."""
    gated = n < k
    constants = {
        "N": n, "K": k, "A_DIV": 8 if gated else 1, "A_SORTED": False, "OUT_SORTED": False, "TWO_ALPHAS": gated,
        "GATED": gated, "UP_FIRST": True, "ACTIVATION": "silu" if gated else "identity", "LIMIT": None,
        "SWIGLU_ALPHA": 1.0, "SWIGLU_BETA": 0.0, "COLUMN_MAJOR": True,
        "NATIVE": numerics == "w4a4" and capability[0] == 12, "BLOCK_M": config.block_rows, "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k, "STAGES": config.num_stages,
    }  # fmt: skip
    absent = {"router_weight_ptr"} if gated else set()
    if numerics == "w4a16":
        absent.add("a_scale_ptr")
    constants |= dict.fromkeys(absent)
    pointers = {name: dtype for name, dtype in POINTERS.items() if name not in absent}
    if numerics == "w4a16":
        pointers["a_ptr"] = "*bf16"
    params = kernel.grouped_gemm.params
    source = ASTSource(
        fn=kernel.grouped_gemm,
        signature={param.name: pointers.get(param.name, "constexpr") for param in params},
        constexprs={(param.num,): constants[param.name] for param in params if param.name not in pointers},
        attrs={(param.num,): [["tt.divisibility", 16]] for param in params if param.name in ALIGNED},
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    result = triton.compile(
        source, target=target, options={"num_warps": config.num_warps, "num_stages": config.num_stages}
    )
    usage = run_on_cubin("cuobjdump", "--dump-resource-usage", result.asm["cubin"])
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups())
    return Compiled(
        result.metadata.shared, stack, local, registers, run_on_cubin("nvdisasm", "-c", result.asm["cubin"])
    )


def run_on_cubin(program: str, option: str, cubin: bytes) -> str:
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "looked-at.cubin"
    path.write_bytes(cubin)
    return subprocess.run([BIN / program, option, path], capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """So that what is looked at was compiled by this Triton, now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def check_compiled(config: GemmConfig, n: int, k: int, *, numerics: str, capability: tuple[int, int]) -> None:
    found = compiled(config, n, k, numerics=numerics, capability=capability)
    assert found.shared <= shared_memory_bound(config, numerics=numerics, capability=capability)
    assert found.shared <= {12: 101_376, 9: 232_448}[capability[0]]
    if capability == SM120:
        assert (found.stack, found.local) == (0, 0), "spills"
        native = re.findall(r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X", found.sass)
        decoded = re.findall(r"HMMA\.16816\.F32\.BF16", found.sass)
        assert bool(native) == (numerics == "w4a4")
        assert bool(decoded) == (numerics == "w4a16")


@COMPILES
@pytest.mark.parametrize(
    ("config", "numerics"),
    [(config, numerics) for numerics, configs in CANDIDATES.items() for config in configs],
    ids=lambda value: "x".join(map(str, dataclasses.astuple(value))) if isinstance(value, GemmConfig) else value,
)
def test_every_candidate_compiles_for_sm120(config, numerics) -> None:
    """With K off the step wherever the tile can be chosen for one."""
    n, k = (512, 6144) if config.block_k == 256 else (2880, 352)
    check_compiled(config, n, k, numerics=numerics, capability=SM120)


@COMPILES
@pytest.mark.parametrize("tokens", [64, 8192])
@pytest.mark.parametrize("model", [model for model in MODELS if model != "odd"])
def test_the_tiles_of_a_model_compile_for_sm120(model, tokens) -> None:
    experts, top_k, gemms = MODELS[model]
    for n, k in gemms:
        config = choose(tokens, top_k, experts, n, k, numerics="w4a4", capability=SM120)
        check_compiled(config, n, k, numerics="w4a4", capability=SM120)


@COMPILES
@pytest.mark.parametrize("numerics", CANDIDATES)
def test_the_largest_tiles_compile_for_sm90(numerics) -> None:
    for n, k in ((512, 6144), (2880, 352)):
        config = choose_for_block_rows(128, n, k, numerics=numerics, capability=SM90)
        check_compiled(config, n, k, numerics=numerics, capability=SM90)
