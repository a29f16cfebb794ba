"""What is read of a machine: fat binaries against nvcc and cuobjdump, nvidia-smi, lspci, /proc, and a live machine."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from recorded_machines import HEALTHY, MACHINES, NAMES, Silent, facts_of

from sglang_sm120.doctor import facts_fatbin, facts_pci, facts_smi, machine
from sglang_sm120.doctor.facts import gather
from sglang_sm120.doctor.facts_fatbin import covers, read_archs
from sglang_sm120.doctor.machine import Output, Recorder, Recording, ThisMachine


def cuobjdump() -> str | None:
    found = shutil.which("cuobjdump")
    if found is None:
        try:
            bundled = metadata.distribution("triton").locate_file("triton/backends/nvidia/bin/cuobjdump")
        except metadata.PackageNotFoundError:
            return None
        found = str(bundled) if Path(str(bundled)).exists() else None
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None or cuobjdump() is None, reason="needs nvcc and cuobjdump")
def test_architectures_against_cuobjdump(tmp_path: Path) -> None:
    source, library = tmp_path / "a.cu", tmp_path / "a.so"
    source.write_text("__global__ void k(float *x) { x[0] = 1; }\nvoid f(float *x) { k<<<1, 1>>>(x); }\n")
    targets = [("90a", "sm_90a"), ("100", "sm_100"), ("120f", "sm_120f"), ("121a", "sm_121a"), ("103", "compute_103")]
    flags = [word for arch, code in targets for word in ("-gencode", f"arch=compute_{arch},code={code}")]
    build = ["nvcc", "-shared", "-Xcompiler", "-fPIC", *flags, str(source), "-o", str(library)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this nvcc does not build it: {done.stderr[:200]}")
    tool = cuobjdump()
    assert tool is not None
    listed = subprocess.run([tool, "-lelf", "-lptx", str(library)], capture_output=True, text=True, check=True).stdout
    theirs = set(re.findall(r"\.(sm_\w+)\.cubin", listed))
    theirs |= {f"compute_{number}" for number in re.findall(r"\.sm_(\w+)\.ptx", listed)}
    ours, complete = read_archs([library], 5)
    assert complete and ours == {code for _, code in targets}
    # Some versions of the tool list a family's code under its plain number.
    assert {name.removesuffix("f") for name in ours} == {name.removesuffix("f") for name in theirs}


def entry(kind: int, arch: int, flags: int = 0x11, payload: int = 24) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, payload, 0, 0, 8, 1, arch)
    return head.ljust(40, b"\0") + struct.pack("<Q", flags) + bytes(16) + b"\xaa" * payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(section: bytes, name: bytes = b".nv_fatbin") -> bytes:
    """A 64-bit ELF file with that section and the one of the names."""
    names = b"\0" + name + b"\0.shstrtab\0"
    at = 64
    table = at + len(section) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<Q", table)
    header = header.ljust(58, b"\0") + struct.pack("<HHH", 64, 3, 2)
    rows = [(0, 0, 0), (1, at, len(section)), (2 + len(name), at + len(section), len(names))]
    headers = b"".join(struct.pack("<IIQQQQ", n, 1, 0, 0, start, size).ljust(64, b"\0") for n, start, size in rows)
    return header + section + names + headers


def test_architectures_of_a_library_made_by_hand(tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    first = container(entry(2, 90), entry(2, 120, 0x11 | 1 << 20), entry(1, 100))
    library.write_bytes(elf(first + bytes(16) + container(entry(2, 121, 0x11 | 1 << 21))))
    assert read_archs([library], 5) == ({"sm_90", "sm_120a", "compute_100", "sm_121f"}, True)


@pytest.mark.parametrize("size", [0, 3, 63, 64, 100, 200, 300, 400])
def test_damaged_libraries_are_skipped(size: int, tmp_path: Path) -> None:
    library, whole = tmp_path / "x.so", elf(container(entry(2, 90), entry(2, 120)))
    library.write_bytes(whole[:size])
    archs, complete = read_archs([library, tmp_path / "missing.so", tmp_path], 5)
    assert complete and archs <= {"sm_90", "sm_120"}


@pytest.mark.parametrize("length", [0, 1 << 63, 2**64 - 1])
def test_sizes_that_make_no_sense_end(length: int, tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    bad_container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, length)
    bad_entry = struct.pack("<HHIQIIHHI", 2, 0x101, 64, length, 0, 0, 8, 1, 90).ljust(64, b"\0")
    library.write_bytes(elf(bad_container + container(bad_entry) + bytes(400)))
    started = time.monotonic()
    read_archs([library], 2)
    assert time.monotonic() - started < 3


def test_what_is_no_container_is_passed_over_at_once(tmp_path: Path) -> None:
    """Large, with the mark where no container can begin, and a container behind."""
    library = tmp_path / "x.so"
    mark = struct.pack("<I", 0xBA55ED50)
    library.write_bytes(elf(bytes(11) + mark + bytes(1) + b"\x01" * (64 << 20) + container(entry(2, 120))))
    started = time.monotonic()
    assert read_archs([library], 5) == ({"sm_120"}, True)
    assert time.monotonic() - started < 3


def test_a_limit_of_time(tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    library.write_bytes(elf(container(*[entry(2, 90)] * 50)))
    assert read_archs([library], -1) == ({"sm_90"}, False)


@pytest.mark.parametrize(
    ("name", "runs_on"),
    [
        ("sm_120", {(12, 0), (12, 1)}), ("sm_120a", {(12, 0)}), ("sm_120f", {(12, 0), (12, 1)}), ("sm_121a", {(12, 1)}),
        ("sm_121", {(12, 1)}), ("sm_100f", set()), ("sm_90", set()), ("compute_90", {(12, 0), (12, 1)}),
        ("compute_90a", set()), ("compute_120", {(12, 0), (12, 1)}), ("compute_121", {(12, 1)}), ("...", set()),
        ("sm_", set()), ("sm_xy", set()), ("compute_120f", {(12, 0), (12, 1)}),
    ],
)  # fmt: skip
def test_which_gpus_code_runs_on(name: str, runs_on: set[tuple[int, int]]) -> None:
    """By CUDA's programming guide, on compatibility of binaries and PTX."""
    assert {capability for capability in ((12, 0), (12, 1)) if covers(name, capability)} == runs_on


def test_fields_of_nvidia_smi() -> None:
    driver = facts_of("switch-4-rtx-pro-6000-acs").driver
    assert (driver.version, driver.cuda, len(driver.gpus)) == ("580.95.05", "13.0", 4)
    busy, capped = driver.gpus[2], driver.gpus[3]
    assert (busy.bus_id, busy.capability, busy.performance_state) == ("0000:85:00.0", (12, 0), "P0")
    assert (busy.link_gen, busy.card_gen, busy.slot_gen, busy.link_lanes) == (4, 5, 5, 16)
    assert (busy.memory_mib, busy.used_mib, busy.bar1_mib) == (97887, 90112, 131072)
    assert busy.slowed == ("hw_slowdown", "hw_power_brake_slowdown")
    (process,) = busy.processes
    assert (process.pid, process.kind, process.used_mib, process.parent) == (41233, "C", 90100, 1)
    assert (capped.power_limit_w, capped.default_power_limit_w) == (250, 300)
    assert (busy.link_under_load, capped.link_under_load, capped.idle) == (True, False, True)
    assert set(driver.links) == {(a, b, "PIX") for a in range(4) for b in range(a + 1, 4)}


def test_a_card_without_ecc_or_mig() -> None:
    first, second = facts_of("desktop-2-rtx-5090-iommu").driver.gpus
    assert (first.ecc, first.mig, first.uncorrected_errors) == ("", "", 0)
    assert [(p.kind, p.name) for p in first.processes] == [("G", "Xorg"), ("G", "gnome-shell")]
    assert (second.link_lanes, second.slot_gen, second.bar1_mib) == (4, 4, 256)


def test_matrix_with_underlined_header() -> None:
    """A terminal's codes, and columns of network cards between."""
    text = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \tSYS\tPIX\t0-7\t0\n"
    text += "GPU1\tSYS\t X \tSYS\t8-15\t1\nNIC0\tPIX\tSYS\t X \n"
    assert facts_smi.matrix(text) == ((0, 1, "SYS"),)
    assert facts_smi.matrix("") == ()


def test_bridges_above_gpus() -> None:
    text = (MACHINES / "switch-4-rtx-pro-6000-acs" / "lspci.txt").read_text()
    gpus = [f"0000:{bus}:00.0" for bus in ("83", "84", "85", "86")]
    bridges = facts_pci.read_bridges(text, gpus)
    assert [(b.bus_id, b.kind, b.redirects) for b in bridges] == [
        ("0000:82:00.0", "Downstream Port", True),
        ("0000:82:01.0", "Downstream Port", True),
        ("0000:82:02.0", "Downstream Port", True),
        ("0000:82:03.0", "Downstream Port", True),
        ("0000:81:00.0", "Upstream Port", False),
        ("0000:80:01.1", "Root Port", False),
    ]
    assert bridges[0].gpus == ("0000:83:00.0",) and bridges[-1].gpus == tuple(gpus)
    assert facts_pci.read_bridges(text, ["0001:83:00.0"]) == (), "another domain"


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_a_recording_says_the_same(name: str, tmp_path: Path) -> None:
    recorder = Recorder(Recording(MACHINES / name))
    facts = gather(recorder)
    for file, text in recorder.sections().items():
        (tmp_path / file).write_text(text)
    assert gather(Recording(tmp_path)) == facts


def commands(monkeypatch: pytest.MonkeyPatch, **argv: tuple[str, ...]) -> None:
    limit_s = 1.0
    monkeypatch.setattr(
        machine, "_COMMANDS", {name.replace("_", "-"): (words, limit_s) for name, words in argv.items()}
    )


def test_commands_of_a_live_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    commands(
        monkeypatch,
        good=(python, "-c", "print('x')"),
        bad=(python, "-c", "import sys; sys.exit('went wrong')"),
        gone=("no-such-program",),
        stuck=(python, "-c", "import time; print('begun', flush=True); time.sleep(60)"),
        child=("sh", "-c", "sleep 60 & echo begun; wait"),
    )
    here = ThisMachine({})
    assert here.run("good") == Output("ok", "x\n")
    assert here.run("bad") == Output("failed", "went wrong\n", 1)
    assert here.run("gone") == Output("missing")
    started = time.monotonic()
    assert here.run("stuck") == Output("hung", "begun\n")
    assert here.run("child") == Output("hung", "begun\n"), "what it started is ended too"
    assert time.monotonic() - started < 6
    assert ThisMachine({}, quick=True).run("good") == Output("skipped")


def test_hung_torch_keeps_what_it_had_said() -> None:
    class Hung(Silent):
        def run(self, name: str) -> Output:
            said = '{"version": "2.14.1+cu130", "cuda": "13.0", "archs": ["sm_120"]}\n'
            return Output("hung", said) if name == "torch" else Output("missing")

    torch = gather(Hung()).torch
    assert (torch.state, torch.version, torch.archs, torch.gpus) == ("hung", "2.14.1+cu130", ("sm_120",), None)


def test_torch_starts_cuda_when_nvidia_smi_is_done() -> None:
    """Else nvidia-smi shows that process among those that use the GPUs."""
    running: set[str] = set()
    beside_torch: set[str] = set()
    begun: list[str] = []

    class Slow(Silent):
        def run(self, name: str) -> Output:
            if name not in begun:
                begun.append(name)
                running.add(name)
                if name == "torch":
                    beside_torch.update(running - {"torch"})
                time.sleep(0.05)
                running.discard(name)
            return Output("missing")

    gather(Slow())
    assert set(begun) == set(machine.COMMANDS) and begun[-1] == "torch" and not beside_torch


def test_limits_and_memory() -> None:
    host = facts_of(HEALTHY).host
    assert (host.memory, host.available) == (1510 << 30, 1460 << 30)
    assert (host.files_hard, host.locked) == (1048576, -1)
    assert host.nodes == ((0, 755 << 30), (1, 755 << 30)) and not host.container
    assert facts_of("container-without-sys").host.container


@pytest.mark.parametrize(
    ("real", "files", "environ"),
    [
        ("/.dockerenv", {}, {}),
        ("/var/run/secrets/kubernetes.io", {}, {}),
        ("", {"/proc/1/cgroup": "0::/system.slice/containerd.service/kubepods-pod1\n"}, {}),
        ("", {"/run/.containerenv": 'engine="podman-5.2"'}, {}),
        ("", {}, {"NVIDIA_VISIBLE_DEVICES": "0,1"}),
        ("", {"/proc/1/cgroup": "0::/init.scope\n"}, None),
    ],
)
def test_containers(real: str, files: dict[str, str], environ: dict[str, str] | None) -> None:
    class There(Silent):
        def text(self, path: str) -> str:
            return files.get(path, "")

        def real(self, path: str) -> str:
            return path if path == real else ""

    here = There()
    here.environ = environ or {}
    assert gather(here).host.container == (environ is not None)


def test_the_environment_is_only_what_concerns_us() -> None:
    here = ThisMachine({"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "USER": "me", "SGLANG_PLUGINS": "sm120"})
    assert dict(here.environ) == {"NCCL_DEBUG": "INFO", "SGLANG_PLUGINS": "sm120"}


def test_no_more_is_read_than_headers() -> None:
    assert facts_fatbin._ENTRY.size == 32, "the architecture ends at byte 32"
