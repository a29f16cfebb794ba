"""Which code a device gets, and what reaches the driver: a driver and an NVRTC that only write down the calls."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_sm120.errors import ConfigError, ContractError, UnsupportedError
from sglang_sm120.kernels.cuda import build, module

PREBUILT, COMPILED = b"a prebuilt cubin", b"a cubin from NVRTC"
GPU = torch.device("cuda", 0)
CUDA_DRIVER = module._cuda_driver


class Args(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int))


class Status(int):
    name = "CUDA_ERROR_INVALID_IMAGE"


class Driver:
    """cuda.bindings.driver with one library of one kernel."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic"
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl")

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.refused: set[bytes] = set()
        self.launches: list[tuple[object, ...]] = []
        self.allowed: list[int] = []
        self.shared_limit = 99 * 1024
        self.context = 0
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())
        self.CUlaunchConfig = SimpleNamespace

    def cuCtxGetCurrent(self):
        return Status(0), self.context

    def cuDeviceGet(self, index):
        return Status(0), f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device):
        return Status(0), f"context of {device}"

    def cuCtxSetCurrent(self, context):
        assert context == "context of device 0"
        self.context = 5
        return (Status(0),)

    def cuLibraryLoadData(self, cubin, *_):
        assert self.context == 5
        if cubin in self.refused:
            return Status(200), None
        self.loaded.append(cubin)
        return Status(0), "library"

    def cuLibraryGetKernelCount(self, library):
        return Status(0), 1

    def cuLibraryEnumerateKernels(self, count, library):
        return Status(0), ["handle"] * count

    def cuKernelGetName(self, handle):
        return Status(0), b"scale"

    def cuKernelGetFunction(self, handle):
        return Status(0), "function"

    def cuKernelGetParamInfo(self, handle, index):
        return Status(0), 0, 16

    def cuFuncGetAttribute(self, attribute, function):
        assert attribute == "static"
        return Status(0), 1024

    def cuFuncSetAttribute(self, function, attribute, value):
        assert (function, attribute) == ("function", "dynamic")
        self.allowed.append(value)
        return (Status(0 if value + 1024 <= self.shared_limit else 1),)

    def _args(self, parameters):
        pointer = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        args = ctypes.cast(pointer, ctypes.POINTER(Args)).contents
        return args.x, args.n

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        self.launches.append((function, gx, bx, shared, stream, self._args(parameters)))
        return (Status(0),)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        c = config
        assert (c.gridDimY, c.gridDimZ, c.blockDimY, c.blockDimZ, extra, c.numAttrs) == (1, 1, 1, 1, 0, 1)
        (attribute,) = c.attrs
        assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed) == ("pdl", 1)
        shape = (c.gridDimX, c.blockDimX, c.sharedMemBytes, c.hStream)
        self.launches.append((function, *shape, self._args(parameters), config))
        return (Status(0),)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(module, "_cuda_driver", lambda: fake)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=77))
    return fake


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """What was compiled: (architecture, defines)."""
    compiled: list[tuple[str, tuple[str, ...]]] = []

    def compile_cubin(source, arch, defines=()):
        compiled.append((arch, defines))
        return COMPILED

    monkeypatch.setattr(build, "compile_cubin", compile_cubin)
    monkeypatch.setattr(build, "nvrtc_version", lambda: "13.5")
    return compiled


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with a prebuilt cubin for sm_120a, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "CUBINS", tmp_path / "cubins")
    path = tmp_path / "op" / "kernel.cu"
    path.parent.mkdir()
    path.write_text("// a kernel")
    (path.parent / "own.cuh").write_text("// its header")
    entry = {
        "sha256": hashlib.sha256(PREBUILT).hexdigest(), "source_hash": build.source_hash(path), "nvrtc": "13.5",
        "options": build.options("sm_120a"),
    }  # fmt: skip
    build.write_atomic(build.CUBINS / "kernel-sm_120a.cubin.xz", build.pack_cubin(PREBUILT))
    build.write_atomic(build.CUBINS / build.MANIFEST, json.dumps({"kernel-sm_120a.cubin.xz": entry}).encode())
    return path


def logged(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in caplog.records if record.name == module.__name__]
    assert record.levelno == logging.INFO
    return record.getMessage()


def test_the_prebuilt_cubin_of_this_architecture_is_used(source, driver, nvrtc, caplog) -> None:
    caplog.set_level(logging.INFO)
    first = module.load(source, torch.device("cuda"))
    assert module.load(source, GPU) is first, "one module a source and device"
    assert (driver.loaded, nvrtc) == ([PREBUILT], [])
    assert "prebuilt kernel-sm_120a.cubin.xz" in logged(caplog)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((12, 1), "sm_121a"), ((8, 9), "sm_89"), ((10, 0), "sm_100")]
)
def test_another_architecture_is_compiled_once_and_cached(
    capability, arch, source, driver, nvrtc, caplog, monkeypatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module.load(source, GPU)
    assert (driver.loaded, nvrtc) == ([COMPILED], [(arch, ())])
    assert f"compiled by NVRTC for {arch}, since there is no prebuilt cubin for {arch}" in logged(caplog)
    module._loaded.clear()
    module.load(source, GPU)
    assert (driver.loaded, nvrtc) == ([COMPILED] * 2, [(arch, ())]), "the second time from the cache"
    (stored,) = build.cache_dir().iterdir()
    stored.write_bytes(stored.read_bytes()[:-3])
    module._loaded.clear()
    module.load(source, GPU)
    assert (driver.loaded, len(nvrtc)) == ([COMPILED] * 3, 2), "a truncated file of the cache is not used"


def exchange(source: Path) -> None:
    (build.CUBINS / "kernel-sm_120a.cubin.xz").write_bytes(build.pack_cubin(b"of another day"))


def corrupt(source: Path) -> None:
    path = build.CUBINS / "kernel-sm_120a.cubin.xz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def lose(source: Path) -> None:
    (build.CUBINS / "kernel-sm_120a.cubin.xz").unlink()


def break_manifest(source: Path) -> None:
    (build.CUBINS / build.MANIFEST).write_text("[1]")


def other_options(source: Path) -> None:
    path = build.CUBINS / build.MANIFEST
    path.write_text(path.read_text().replace("c++17", "c++14"))


def change_source(source: Path) -> None:
    source.write_text("// a newer kernel")


def change_header(source: Path) -> None:
    (source.parent / "own.cuh").write_text("// its newer header")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (exchange, "kernel-sm_120a.cubin.xz is damaged: its sha256 is not the manifest's"),
        (corrupt, r"kernel-sm_120a.cubin.xz cannot be read \("),
        (lose, "No such file"),
        (break_manifest, r"the manifest of prebuilt cubins cannot be read \(not a table"),
        (other_options, "kernel-sm_120a.cubin.xz is stale: it was compiled with other options"),
        (change_source, "kernel-sm_120a.cubin.xz is stale: the source or a header has changed"),
        (change_header, "kernel-sm_120a.cubin.xz is stale: the source or a header has changed"),
    ],
)
def test_a_prebuilt_cubin_that_does_not_fit_is_not_used(damage, reason, source, driver, nvrtc, caplog) -> None:
    caplog.set_level(logging.INFO)
    damage(source)
    module.load(source, GPU)
    module.load(source, GPU)
    assert (driver.loaded, nvrtc) == ([COMPILED], [("sm_120a", ())])
    assert re.search(reason, logged(caplog))


def test_a_shared_header_is_part_of_the_hash(source, tmp_path, monkeypatch) -> None:
    before = build.source_hash(source)
    monkeypatch.setattr(build, "SHARED_HEADERS", tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    without = build.source_hash(source)
    (tmp_path / "shared" / "common.cuh").write_text("// one")
    one = build.source_hash(source)
    (tmp_path / "shared" / "common.cuh").write_text("// two")
    assert len({before, without, one, build.source_hash(source)}) == 4


def test_a_prebuilt_cubin_that_the_driver_refuses_is_replaced(source, driver, nvrtc, caplog) -> None:
    caplog.set_level(logging.INFO)
    driver.refused = {PREBUILT}
    module.load(source, GPU)
    assert driver.loaded == [COMPILED]
    assert "was refused (cuLibraryLoadData failed: CUDA_ERROR_INVALID_IMAGE)" in logged(caplog)
    driver.refused.add(COMPILED)
    with pytest.raises(UnsupportedError, match="CUDA_ERROR_INVALID_IMAGE"):
        module.load(source, torch.device("cuda", 1))


def test_variants_are_compiled_and_kept_apart(source, driver, nvrtc) -> None:
    modules = {id(module.load(source, GPU, defines)) for defines in ((), ("A",), ("A=2",), ("A",))}
    assert (len(modules), nvrtc) == (3, [("sm_120a", ("A",)), ("sm_120a", ("A=2",))])


def test_a_cache_that_cannot_be_written_is_done_without(source, driver, nvrtc, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    module.load(source, GPU, ("A",))
    assert driver.loaded == [COMPILED]


@pytest.mark.parametrize("device", ["meta", "xpu:0"])
def test_other_devices_are_refused(device: str, source: Path) -> None:
    with pytest.raises(UnsupportedError, match="a CUDA device or the CPU"):
        module.load(source, torch.device(device))


def test_without_cuda_bindings(source, driver, caplog, monkeypatch) -> None:
    message = r"(?s)cuda\.bindings cannot be imported.*fix: +pip install cuda-bindings"
    monkeypatch.setattr(module, "_cuda_driver", CUDA_DRIVER)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=message):
        module.load(source, GPU)
    with pytest.raises(UnsupportedError, match=message):
        build.compile_cubin(source, "sm_120a")
    assert caplog.records == []


def test_nvrtc_that_is_missing_or_refuses(source, monkeypatch) -> None:
    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(build, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=missing))
    with pytest.raises(UnsupportedError, match=r"(?s)NVRTC cannot be loaded .*libnvrtc.*nvidia-cuda-nvrtc"):
        build.nvrtc_version()

    log = b"kernel.cu(3): error: expected a declaration\n\0"
    destroyed = []

    def put_log(program, into):
        into[:] = log

    monkeypatch.setattr(
        build,
        "_nvrtc",
        lambda: SimpleNamespace(
            nvrtcVersion=lambda: (Status(0), 13, 5),
            nvrtcCreateProgram=lambda *_: (Status(0), "program"),
            nvrtcCompileProgram=lambda *_: (Status(6),),
            nvrtcGetProgramLogSize=lambda program: (Status(0), len(log)),
            nvrtcGetProgramLog=put_log,
            nvrtcDestroyProgram=destroyed.append,
        ),
    )
    with pytest.raises(ConfigError, match=r"(?s)does not compile for sm_120a.*kernel.cu\(3\): error: expected a decl"):
        build.compile_cubin(source, "sm_120a")
    assert destroyed == ["program"]


def test_launch(source, driver) -> None:
    loaded = module.load(source, GPU)
    loaded.launch("scale", 3, 64, Args(5, 6))
    loaded.launch("scale", 4, 32, Args(7, 8), shared_bytes=100, stream=9)
    assert driver.launches == [("function", 3, 64, 0, 77, (5, 6)), ("function", 4, 32, 100, 9, (7, 8))]
    assert driver.allowed == []


def test_programmatic_launch_keeps_its_configurations(source, driver) -> None:
    loaded = module.load(source, GPU)
    for grid, n in ((3, 1), (4, 2), (3, 3)):
        loaded.launch("scale", grid, 64, Args(5, n), shared_bytes=16, programmatic=True)
    assert [launch[:-1] for launch in driver.launches] == [
        ("function", grid, 64, 16, 77, (5, n)) for grid, n in ((3, 1), (4, 2), (3, 3))
    ]
    first, second, third = (launch[-1] for launch in driver.launches)
    assert first is third is not second
    for grid in range(1, 3000):
        loaded.launch("scale", grid, 64, Args(5, 0), programmatic=True)
    assert [launch[1] for launch in driver.launches[3:]] == list(range(1, 3000))
    assert len(loaded._kernels["scale"].configs) <= 1024


def test_more_shared_memory_than_the_default_is_asked_for_once(source, driver) -> None:
    loaded = module.load(source, GPU)
    default = 47 * 1024  # the kernel has 1 KiB of static shared memory
    for shared_bytes in (default, default + 1, default + 1, 60_000, 55_000):
        loaded.launch("scale", 1, 32, Args(0, 0), shared_bytes=shared_bytes)
    assert driver.allowed == [default + 1, 60_000]
    with pytest.raises(ContractError, match="102400 B of dynamic and 1024 B of static shared memory"):
        loaded.launch("scale", 1, 32, Args(0, 0), shared_bytes=102_400)
    assert len(driver.launches) == 5


def test_a_wrong_launch_is_refused(source, driver) -> None:
    loaded = module.load(source, GPU)
    with pytest.raises(ContractError, match=r"(?s)no kernel nothing.*one of scale"):
        loaded.launch("nothing", 1, 32, Args(0, 0))
    with pytest.raises(ContractError, match="the 16 bytes of the kernel's struct"):
        loaded.launch("scale", 1, 32, ctypes.c_int(0))
    with pytest.raises(ContractError, match="grid 0"):
        loaded.launch("scale", 0, 32, Args(0, 0))
    driver.cuLaunchKernel = lambda *_: (Status(1),)
    with pytest.raises(UnsupportedError, match=r"launching scale \(grid 1, block 32, 0 B"):
        loaded.launch("scale", 1, 32, Args(0, 0))
