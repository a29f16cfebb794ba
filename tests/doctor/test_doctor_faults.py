"""One fault at a time on a healthy machine: the finding that names it, its level, and that no other check cries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from recorded_machines import bad, facts_of, of, with_gpus, with_python

from sglang_sm120.doctor.facts import Facts, Torch
from sglang_sm120.doctor.facts_gpus import Driver
from sglang_sm120.doctor.facts_pci import PciGpu


def driver(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, driver=replace(facts.driver, **changes))


def gpus(count: int = 8, **changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: with_gpus(facts, count, **changes)


def bus(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, bus=replace(facts.bus, **changes))


def host(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, host=replace(facts.host, **changes))


def torch(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, torch=replace(facts.torch, **changes))


def environ(**variables: str) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, environ=variables)


def python(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: with_python(facts, **changes)


def tools(*missing: str) -> Callable[[Facts], Facts]:
    def change(facts: Facts) -> Facts:
        kept = {name: path for name, path in facts.python["tools"].items() if name not in missing}
        return with_python(facts, tools=kept)

    return change


FAULTS: list[tuple[str, str, Callable[[Facts], Facts]]] = [
    ("warn", "gpu.on-bus", lambda f: replace(f, pci_gpus=(*f.pci_gpus, PciGpu("0000:f5:00.0", "nvidia", 1)))),
    ("fail", "gpu.mode", gpus(compute_mode="Prohibited")),
    ("warn", "gpu.mode", gpus(mig="Enabled")),
    ("warn", "gpu.faults", gpus(uncorrected_errors=3)),
    ("warn", "gpu.faults", gpus(row_remapping_failed=True)),
    ("warn", "gpu.power", gpus(slowed=("sw_thermal_slowdown",))),
    ("warn", "bus.link", gpus(link_lanes=4)),
    ("warn", "bus.link", gpus(link_lanes=8)),
    ("warn", "bus.link", gpus(link_gen=1, busy=True, idle=False, performance_state="P0")),
    ("warn", "bus.bar1", gpus(bar1_mib=256)),
    ("warn", "bus.iommu", bus(gpu_iommu_types=("0000:05:00.0: DMA-FQ",))),
    ("warn", "bus.acs", bus(acs_bridges=("0000:82:00.0",))),
    ("warn", "bus.driver-settings", bus(force_p2p=True, driver_parameters=("RegistryDwords: ForceP2P=0x11",))),
    ("warn", "bus.p2p", driver(p2p=((0, 1, "TNS"), (0, 2, "OK")))),
    ("fail", "software.torch", torch(state="failed", detail="libcudart.so.13: cannot open")),
    ("fail", "software.torch", torch(state="hung")),
    ("fail", "software.torch", torch(gpus=None, cuda_error="initialization error")),
    ("fail", "software.ready-code", torch(archs=("sm_90", "sm_100"))),
    ("fail", "software.ready-code", python(archs={"sglang-kernel": ["sm_90a", "sm_100a"]})),
    ("warn", "software.ready-code", python(archs={"flashinfer-jit-cache": ["sm_90a"]})),
    ("fail", "software.jit", tools("nvcc")),
    ("fail", "software.jit", tools("ninja")),
    ("fail", "software.jit", tools("c++")),
    ("fail", "software.jit", tools("libcudart")),
    ("fail", "software.jit", lambda f: replace(f, nvcc="12.6")),
    ("fail", "software.jit", lambda f: replace(f, nvcc="14.0")),
    ("warn", "host.shared-memory", host(shared=64 << 20, shared_free=64 << 20)),
    ("warn", "host.shared-memory", host(shared_free=1 << 20)),
    ("warn", "host.memory", host(available=1 << 30)),
    ("fail", "environment.visible-devices", environ(CUDA_VISIBLE_DEVICES="")),
    ("fail", "environment.visible-devices", environ(CUDA_VISIBLE_DEVICES="0,0")),
    ("fail", "environment.visible-devices", environ(CUDA_VISIBLE_DEVICES="0,8")),
    ("warn", "environment.variables", environ(CUDA_LAUNCH_BLOCKING="1")),
    ("warn", "environment.variables", environ(NCCL_SHM_DISABLE="1")),
    ("fail", "environment.variables", environ(FLASHINFER_CUDA_ARCH_LIST="9.0a 10.0a")),
    ("warn", "installation.duplicates", python(packages={"triton": ["3.7.0", "3.8.0"]})),
    ("warn", "installation.duplicates", python(packages={"nvidia-cutlass-dsl-libs-base": ["4.7.1"]})),
]


@pytest.mark.parametrize(("level", "check", "change"), FAULTS, ids=[f"{n}-{row[1]}" for n, row in enumerate(FAULTS)])
def test_a_fault_is_named_and_nothing_else(level: str, check: str, change: Callable[[Facts], Facts]) -> None:
    assert bad(change(facts_of())) == {(level, check)}


@pytest.mark.parametrize(
    "change",
    [
        gpus(link_gen=1, busy=False),
        gpus(link_gen=1, busy=True, idle=True, performance_state="P0"),
        gpus(link_gen=2, busy=True, idle=False, performance_state="P5"),
        gpus(link_gen=4, slot_gen=4, busy=True, idle=False, performance_state="P0"),
        gpus(power_limit_w=300.0),
        gpus(compute_mode="Exclusive_Process"),
        bus(gpu_iommu_types=()),
        bus(uvm_disable_hmm=False),
        environ(CUDA_VISIBLE_DEVICES="0,1,2,3", NCCL_DEBUG="WARN", FLASHINFER_CUDA_ARCH_LIST="9.0a 12.0f"),
        environ(CUDA_VISIBLE_DEVICES="GPU-1a2b,GPU-3c4d"),
        driver(cuda="13.2"),
        lambda f: replace(f, nvcc="12.9"),
        lambda f: replace(f, nvcc="13.3"),
        host(files_hard=4096, locked=1 << 16),
    ],
)
def test_what_is_no_fault(change: Callable[[Facts], Facts]) -> None:
    assert bad(change(facts_of())) == set()


@pytest.mark.parametrize(
    ("state", "detail", "fix"),
    [
        ("hung", "", "reboot"),
        (
            "failed",
            "Failed to initialize NVML: Driver/library version mismatch",
            "updated under a running kernel module",
        ),
        ("failed", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", "modprobe nvidia"),
    ],
)
def test_a_driver_that_does_not_answer(state: str, detail: str, fix: str) -> None:
    facts = replace(facts_of(), driver=Driver(state, detail), torch=Torch("ok", version="2.14.1", cuda="13.0"))
    (found,) = of(facts, "gpu.driver")
    assert found.level == "fail" and fix in found.fix and detail in found.found


def test_blackwell_under_the_proprietary_modules() -> None:
    module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05"
    facts = replace(facts_of(), driver=Driver("failed", "No devices were found"), module=module)
    (found,) = of(facts, "gpu.driver")
    assert "open kernel modules" in found.fix


def test_one_gpu_needs_no_peers() -> None:
    facts = with_gpus(facts_of(), 1, bar1_mib=256)
    facts = replace(facts, pci_gpus=facts.pci_gpus[:1])
    facts = bus(gpu_iommu_types=("0000:05:00.0: DMA",), acs_bridges=("0000:82:00.0",), uvm_disable_hmm=False)(facts)
    assert bad(facts) == set()


def test_two_kinds_of_cards() -> None:
    facts = facts_of()
    others = tuple(
        replace(gpu, name="NVIDIA A100 80GB PCIe", capability=(8, 0)) if gpu.index < 2 else gpu
        for gpu in facts.driver.gpus
    )
    mixed = driver(gpus=others)(facts)
    found = {f.what: f for f in of(torch(gpus=None)(mixed), "gpu.kind")}
    assert found["GPU"].level == "warn" and "CUDA_VISIBLE_DEVICES=2,3,4,5,6,7" in found["GPU"].fix
    assert found["different GPUs"].level == "note"
    hidden = {f.what: f for f in of(torch(gpus=facts.torch.gpus[2:])(mixed), "gpu.kind")}
    assert hidden["GPU"].level == "note", "CUDA_VISIBLE_DEVICES leaves the others out, however it names them"


def test_the_second_capability_needs_its_own_code() -> None:
    """12.1 runs sm_120 and sm_120f, not sm_120a; FlashInfer's JIT wants CUDA 12.9 for it."""
    facts = with_python(gpus(capability=(12, 1))(facts_of()), archs={"sglang-kernel": ["sm_120a"]})
    assert bad(facts) == {("fail", "software.ready-code")}
    facts = with_python(replace(facts, nvcc="12.8"), archs={"sglang-kernel": ["sm_120f"]})
    assert bad(facts) == {("fail", "software.jit")}


def test_files_that_were_not_read_to_the_end_say_nothing() -> None:
    facts = with_python(facts_of(), archs={"sglang-kernel": ["sm_90a", "..."]})
    assert not [f for f in of(facts, "software.ready-code") if "sglang-kernel" in f.what]


def test_processes_left_over_are_told_from_others() -> None:
    facts = facts_of("switch-4-rtx-pro-6000-acs")
    (left,) = of(facts, "gpu.processes")
    assert left.level == "warn" and "process 41233" in left.found
    used = tuple(
        replace(gpu, processes=tuple(replace(process, parent=900) for process in gpu.processes))
        for gpu in facts.driver.gpus
    )
    assert [f.level for f in of(driver(gpus=used)(facts), "gpu.processes")] == ["note"]
