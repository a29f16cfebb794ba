"""The shipped cubins belong to the sources as they are; and, where NVRTC is installed, what it makes of sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cubin_facts
import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.cuda import build, host_build

ROOT = Path(__file__).resolve().parents[3]
NUMERICS = Path(__file__).with_name("numerics.cu")
COLLECTIVES = Path(__file__).with_name("collectives.cu")


def nvrtc_missing() -> str:
    try:
        build.nvrtc_version()
    except build.UnsupportedError as error:
        return error.found
    return ""


needs_nvrtc = pytest.mark.skipif(nvrtc_missing() != "", reason=nvrtc_missing())
needs_cuobjdump = pytest.mark.skipif(not cubin_facts.available(), reason="Triton's cuobjdump is not installed")


def test_the_manifest_lists_the_sources_and_no_others() -> None:
    names = {build.cubin_name(source, arch) for source in build.sources() for arch in build.PREBUILT_ARCHS}
    assert build.read_manifest().keys() == names
    assert {path.name for path in build.CUBINS.glob("*.cubin.xz")} == names
    assert len(names) == len(build.sources()) * len(build.PREBUILT_ARCHS), "ops have names of their own"
    assert len(build.sources()) >= 1


@pytest.mark.parametrize("arch", build.PREBUILT_ARCHS)
@pytest.mark.parametrize("source", build.sources(), ids=build.op_name)
def test_the_shipped_cubin_is_fresh(source: Path, arch: str) -> None:
    cubin, reason = build.prebuilt_cubin(source, arch)
    assert cubin is not None, f"{reason}; run tools/build_cubins.py"
    assert cubin[:4] == b"\x7fELF"


@needs_cuobjdump
@pytest.mark.parametrize("source", build.sources(), ids=build.op_name)
def test_every_kernel_that_is_shipped_also_runs_on_the_cpu(source: Path) -> None:
    """The source has an SM120_HOST_EXPORT for each kernel of the cubin."""
    cubin = build.unpack_cubin((build.CUBINS / build.cubin_name(source, "sm_120a")).read_bytes())
    library = host_build.load(source)._library
    for name in cubin_facts.facts(cubin):
        assert library[f"args_bytes_{name}"]() > 0


def tool(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(cwd / "tools" / "build_cubins.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A package of one op, with the tool."""
    for path in ("sglang_sm120/__init__.py", "sglang_sm120/errors.py", "sglang_sm120/kernels/__init__.py",
                 "tools/build_cubins.py"):  # fmt: skip
        build.write_atomic(tmp_path / path, (ROOT / path).read_bytes())
    for path in build.SHARED_HEADERS.iterdir():
        if path.is_file():
            build.write_atomic(tmp_path / "sglang_sm120/kernels/cuda" / path.name, path.read_bytes())
    build.write_atomic(tmp_path / "sglang_sm120/kernels/moe/some_op/kernel.cu", COLLECTIVES.read_bytes())
    return tmp_path


def test_the_check_names_what_is_missing(copy: Path) -> None:
    done = tool("--check", cwd=copy)
    assert done.returncode == 1, done.stderr
    assert "moe.some_op: there is no prebuilt cubin for sm_120a" in done.stdout
    assert "1 sources, 2 problems" in done.stdout


@needs_nvrtc
def test_the_tool_builds_the_same_bytes_and_checks_them(copy: Path) -> None:
    folder = copy / "sglang_sm120/kernels/cuda/cubins"
    build.write_atomic(folder / "moe.gone-sm_120a.cubin.xz", b"of an op that was removed")
    contents = []
    for _ in range(2):
        done = tool(cwd=copy)
        assert done.returncode == 0, done.stderr
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert contents[0].keys() == {"manifest.json", "moe.some_op-sm_120a.cubin.xz", "moe.some_op-sm_121a.cubin.xz"}
    entry = json.loads(contents[0]["manifest.json"])["moe.some_op-sm_121a.cubin.xz"]
    assert entry.keys() == {"sha256", "source_hash", "nvrtc", "options"}
    assert entry["nvrtc"] == build.nvrtc_version()
    assert tool("--check", cwd=copy).returncode == 0
    header = copy / "sglang_sm120/kernels/cuda/common.cuh"
    header.write_text(header.read_text() + "// changed\n")
    build.write_atomic(folder / "moe.gone-sm_120a.cubin.xz", b"again")
    done = tool("--check", cwd=copy)
    assert done.returncode == 1
    assert "moe.some_op-sm_121a.cubin.xz is stale: the source or a header has changed" in done.stdout
    assert "moe.gone-sm_120a.cubin.xz: no source has it" in done.stdout
    assert "1 sources, 3 problems" in done.stdout


def test_the_tool_and_what_it_imports_need_no_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import sglang_sm120.kernels.cuda.build, "
    code += "sglang_sm120.kernels.cuda.host_build; print({'torch', 'numpy', 'cuda'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@needs_nvrtc
@needs_cuobjdump
@pytest.mark.parametrize(("arch", "native"), [("sm_120a", True), ("sm_121a", True), ("sm_90a", False)])
def test_the_mma_is_one_instruction_on_sm120_and_four_elsewhere(arch: str, native: bool) -> None:
    facts = cubin_facts.facts(build.compile_cubin(NUMERICS, arch))
    for name in ("mma_nvfp4_0_0", "mma_nvfp4_1_3"):
        assert (facts[name].count("OMMA") > 0) == native
        assert (facts[name].count("HMMA") > 0) == (not native)
        assert (facts[name].count("SHFL") > 0) == (not native)
    assert facts["mma_16_bit_bf16"].opcodes["HMMA.16816.F32.BF16"] == 1
    for name, fact in facts.items():
        assert (fact.stack_bytes, fact.local_bytes) == (0, 0), name
        assert 8 <= fact.registers <= 128, name


@needs_nvrtc
@needs_cuobjdump
def test_helpers_become_the_instructions_that_they_are_for() -> None:
    facts = cubin_facts.facts(build.compile_cubin(NUMERICS, "sm_120a"))
    loads = facts["map_loads"].opcodes
    copies = loads["PREEXIT"]  # the loop may be unrolled
    assert copies >= 1
    assert loads["ACQBULK"] == copies, "griddepcontrol.wait; PREEXIT is its launch_dependents"
    streams = [opcode for opcode in loads if {"LDG", "NA", "128", "CONSTANT"} <= set(opcode.split("."))]
    assert [loads[opcode] for opcode in streams] == [copies], "load_stream: past L1, read only"
    assert loads["LDG.E.128"] == copies, "load_cached: an ordinary load"
    assert facts["map_mul_bf16x2"].count("HMUL2") + facts["map_mul_bf16x2"].count("HFMA2") >= 1
    assert facts["map_prmt"].count("PRMT") >= 1
    assert facts["map_e4m3x2_to_f16x2"].count("F2FP") >= 1
    collectives = cubin_facts.facts(build.compile_cubin(COLLECTIVES, "sm_120a"))
    assert collectives["neighbour"].shared_bytes >= 4096 > collectives["dynamic_neighbour"].shared_bytes
    assert collectives["match_any"].count("MATCH") == 1


@needs_nvrtc
def test_nvrtc_reports_errors_and_knows_variants(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('#include "common.cuh"\n#ifdef BROKEN\nbroken\n#endif\nextern "C" __global__ void k() {}\n')
    assert build.compile_cubin(source, "sm_120a")[:4] == b"\x7fELF"
    with pytest.raises(ConfigError, match=r"(?s)does not compile for sm_120a.*kernel\.cu\(3\)"):
        build.compile_cubin(source, "sm_120a", ("BROKEN",))
    with pytest.raises(ConfigError, match="does not compile for sm_12"):
        build.compile_cubin(source, "sm_12")


@needs_nvrtc
def test_the_emulated_mma_can_be_asked_for() -> None:
    cubin = build.compile_cubin(NUMERICS, "sm_120a", ("SM120_EMULATE_MMA",))
    if cubin_facts.available():
        assert cubin_facts.facts(cubin)["mma_nvfp4_0_0"].count("OMMA") == 0
    assert cubin != build.compile_cubin(NUMERICS, "sm_120a")


@needs_nvrtc
def test_the_cache_gives_back_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    assert build.cached_cubin(COLLECTIVES, "sm_120a") == build.compile_cubin(COLLECTIVES, "sm_120a")
    monkeypatch.setattr(build, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert build.cached_cubin(COLLECTIVES, "sm_120a")[:4] == b"\x7fELF"
