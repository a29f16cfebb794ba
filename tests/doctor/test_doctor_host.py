"""Memory within control groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_machines import Silent, facts_of, of

from sglang_sm120.doctor import redact
from sglang_sm120.doctor.facts import Facts, gather
from sglang_sm120.doctor.facts_cgroup import memory_limit
from sglang_sm120.doctor.machine import Recorder, Recording

GIB = 1 << 30


class Host(Silent):
    """100 GiB, of which 80 are free; and other files."""

    def __init__(self, files: dict[str, str]) -> None:
        meminfo = f"MemTotal: {100 * GIB >> 10} kB\nMemAvailable: {80 * GIB >> 10} kB\n"
        self.files = {"/proc/meminfo": meminfo, **files}

    def text(self, path: str) -> str:
        return self.files.get(path, "")


def v2(path: str, limit: str, used: int = 0, files: int = 0) -> dict[str, str]:
    folder = f"/sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\nfile 9\nactive_file {files // 2}\ninactive_file {files - files // 2}\n",
    }  # fmt: skip


def v1(path: str, limit: int, used: int = 0, files: int = 0) -> dict[str, str]:
    folder = f"/sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"active_file 1\ninactive_file 1\ntotal_active_file {files}\ntotal_inactive_file 0\n",
    }  # fmt: skip


OWN = {"/proc/self/cgroup": "0::/system.slice/sglang.service\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (100, 80, None)),
        (OWN | v2("/system.slice/sglang.service", "max"), (100, 80, None)),
        (OWN | v2("/system.slice/sglang.service", str(20 * GIB), 8 * GIB), (20, 12, 20)),
        (OWN | v2("/system.slice/sglang.service", str(20 * GIB), 18 * GIB, 10 * GIB), (20, 12, 20)),
        (OWN | v2("/system.slice/sglang.service", str(20 * GIB), 30 * GIB), (20, 0, 20)),
        (OWN | v2("/system.slice", str(30 * GIB), 5 * GIB), (30, 25, 30)),
        (OWN | v2("/system.slice/sglang.service", str(40 * GIB), GIB) | v2("/system.slice", str(50 * GIB), 49 * GIB),
         (40, 1, 40)),
        (OWN | v2("/system.slice/sglang.service", str(90 * GIB), GIB), (90, 80, 90)),
        (OWN | v2("/system.slice/sglang.service", str(100 * GIB), GIB), (100, 80, None)),
        ({"/proc/self/cgroup": "0::/\n"} | v2("", str(16 * GIB), 4 * GIB), (16, 12, 16)),
        ({"/proc/self/cgroup": "0::/../../other\n"} | v2("", str(16 * GIB), 4 * GIB), (16, 12, 16)),
        ({"/proc/self/cgroup": "0::/docker/abc\n"} | v2("", str(16 * GIB), 4 * GIB), (16, 12, 16)),
        ({"/proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/slurm/job_7\n0::/x\n"}
         | v1("/slurm/job_7", 32 * GIB, 30 * GIB, 8 * GIB) | v1("", (1 << 63) - 4096, GIB), (32, 10, 32)),
        ({"/proc/self/cgroup": "4:memory:/docker/abc\n"} | v1("", 32 * GIB, 2 * GIB), (32, 30, 32)),
        ({"/proc/self/cgroup": "nonsense\n::\n0\n"}, (100, 80, None)),
        (OWN | {"/sys/fs/cgroup/system.slice/memory.max": "many\n"}, (100, 80, None)),
        (OWN | {"/sys/fs/cgroup/system.slice/memory.max": f"{8 * GIB}\n"}, (8, 8, 8)),
    ],
)  # fmt: skip
def test_memory_within_control_groups(files: dict[str, str], expected: tuple[int, int, int | None]) -> None:
    host = gather(Host(files), quick=True).host
    assert host.memory is not None and host.available is not None
    limit = None if host.limit is None else host.limit // GIB
    assert (host.memory // GIB, host.available // GIB, limit) == expected


def test_a_limit_without_the_machines_memory_is_not_asked_for() -> None:
    assert memory_limit(Host(OWN | v2("/system.slice", str(GIB))), GIB) is None


@pytest.mark.parametrize(
    "path",
    ["/docker/9f86d081884c", "/kubepods.slice/kubepods-pod529b3263_c96d.slice/cri-1.scope", "/user.slice/user-7.slice"],
)
@pytest.mark.parametrize("make", [lambda path: ("0::", v2(path, str(20 * GIB), GIB)),
                                  lambda path: ("3:cpu,memory:", v1(path, 20 * GIB, GIB))])  # fmt: skip
def test_a_recording_has_the_limit_and_not_the_names_of_groups(path: str, make, tmp_path: Path) -> None:
    line, files = make(path)
    recorder = Recorder(Host({"/proc/self/cgroup": f"{line}{path}\n", "/proc/1/cgroup": f"{line}{path}\n", **files}))
    live = gather(recorder).host
    for name, text in redact.redact_all(recorder.sections(), redact.Identity()).items():
        (tmp_path / name).write_text(text)
        assert not {"9f86d081", "529b3263", "user-7"} & {
            word for word in ("9f86d081", "529b3263", "user-7") if word in text
        }
    again = gather(Recording(tmp_path)).host
    assert again == live and (live.limit, live.container) == (20 * GIB, "slice/u" not in path)


def test_what_is_said_of_a_limit() -> None:
    low = gather(Host(OWN | v2("/system.slice", str(20 * GIB), 19 * GIB)), quick=True)
    (found,) = of(low, "host.memory")
    assert found.level == "warn" and found.found.startswith("1 GiB available of 20 GiB that the control group")
    assert "docker run --memory" in found.fix
    (found,) = of(gather(Host(OWN | v2("/system.slice", str(20 * GIB), GIB)), quick=True), "host.memory")
    assert found.level == "ok" and "control group" in found.found


def mixed(**environ: str) -> Facts:
    facts = facts_of()
    gpus = tuple(replace(gpu, name="NVIDIA H200") if gpu.index < 2 else gpu for gpu in facts.driver.gpus)
    return replace(facts, driver=replace(facts.driver, gpus=gpus), environ=environ)


def test_the_advice_to_leave_cards_out_says_how_they_are_counted() -> None:
    facts = mixed()
    gpus = tuple(replace(gpu, capability=(9, 0)) if gpu.index < 2 else gpu for gpu in facts.driver.gpus)
    found = of(replace(facts, driver=replace(facts.driver, gpus=gpus)), "gpu.kind")
    (advice,) = [each.fix for each in found if "leaves them out" in each.fix]
    assert advice.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 ")
