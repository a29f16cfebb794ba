"""A driver that does not answer, or not for every GPU: why, what to do, and what is still known."""

from __future__ import annotations

import re
from typing import Any

import pytest
from mutated import mutated, smi, without_gpu
from recorded_machines import HEALTHY, MACHINES, bad, of, only

from sglang_sm120.doctor import facts_smi
from sglang_sm120.doctor.machine import Output

WHOLE = (MACHINES / HEALTHY / "nvidia-smi-q.txt").read_text()
LIST = (MACHINES / HEALTHY / "nvidia-smi-capability.txt").read_text()
NO_HANDLE = "Unable to determine the device handle for GPU0000:45:00.0: Unknown Error\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.105\n"
NO_MODULE = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        (MISMATCH, 18, "the driver was updated under a running kernel module: reboot"),
        (NO_MODULE, 9, "sudo modprobe nvidia"),
        ("No devices were found\n", 6, "dmesg"),
        ("Failed to initialize NVML: Unknown Error\n", 255, "reboot"),
        ("Failed to initialize NVML: GPU access blocked by the operating system\n", 17, "wsl --update"),
        ("Failed to initialize NVML: Insufficient Permissions\n", 4, "/dev/nvidia*"),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", 12, "libraries anew"),
        ("Failed to initialize NVML: GPU is lost\n", 15, "Xid 79"),
        ("", -11, "modprobe"),
        ("something that nobody has seen\n", 3, "dmesg"),
    ],
)
def test_a_driver_that_does_not_answer_says_why(text: str, code: int, fix: str) -> None:
    blind = '{"version": "2.14.1", "cuda": "13.0", "archs": ["sm_120"]}\n{"cuda_error": "initialization error"}\n'
    commands = {**smi(text, code), "torch": Output("ok", blind)}
    if text:  # some versions end with status 0 all the same
        ended_well = {name: Output("ok", text) for name in smi(text)}
        assert of(mutated(commands=commands | ended_well), "gpu.driver") == of(mutated(commands=commands), "gpu.driver")
    facts = mutated(commands=commands)
    found = only(facts, "gpu.driver")
    assert found.level == "fail" and fix in found.fix
    assert (" ".join(text.split()) or "SIGSEGV") in found.found
    assert not [f for f in of(facts, "gpu.kind") if f.level == "ok"], "nothing is known of GPUs"


def test_in_a_container_the_fix_is_another() -> None:
    for text, fix in (
        (MISMATCH, "start the container anew"),
        (NO_MODULE, "--gpus all"),
        ("No devices were found\n", "--gpus all"),
        ("Failed to initialize NVML: Unknown Error\n", "start the container anew"),
    ):
        found = only(mutated(commands=smi(text), environ={"NVIDIA_VISIBLE_DEVICES": "all"}), "gpu.driver")
        assert found.level == "fail" and fix in found.fix.splitlines()[0]


def test_the_tool_without_gpu_and_driver_is_no_more_than_no_gpu() -> None:
    """An image for GPUs on a machine without: as where nvidia-smi is missing."""
    for text in (NO_MODULE, "No devices were found\n"):
        facts = mutated("no-gpu", commands={"nvidia-smi-q": Output("failed", text, 9)})
        assert bad(facts) == {("warn", "gpu.kind")}


@pytest.mark.parametrize("text", [WHOLE.partition("<gpu ")[0] + "</nvidia_smi_log>\n", "No devices were found\n"])
@pytest.mark.parametrize("container", [False, True])
def test_no_gpu_in_an_answer_that_is_well(text: str, container: bool) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"} if container else {}
    none = Output("ok", text)
    facts = mutated(commands={"nvidia-smi-q": none, "nvidia-smi-capability": Output("ok")}, environ=environ)
    assert ("fail", "gpu.driver") in bad(facts)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (NO_HANDLE, "0000:45:00.0"),
        ("Unable to determine the device handle for gpu 0000:45:00.0: Unknown Error\n", "0000:45:00.0"),
        ("Unable to determine the device handle for GPU2: 0000:45:00.0: Unknown Error\n", "0000:45:00.0"),
        (
            "Unable to determine the device handle for GPU 00000000:45:00.0: GPU is lost.  Reboot the system to "
            "recover this GPU\n",
            "0000:45:00.0",
        ),
        ("Unable to determine the device handle for GPU2: Not Found\n", "GPU 2"),
    ],
)
@pytest.mark.parametrize("at", ["alone", "before", "after", "between", "cut"])
def test_a_gpu_off_the_bus_is_named_and_the_others_are_shown(line: str, where: str, at: str) -> None:
    listing = "".join(row for row in LIST.splitlines(keepends=True) if ":45:" not in row) + line
    there = without_gpu(2)(WHOLE)
    first, second = there.index("\t<gpu id"), there.index("</gpu>\n") + len("</gpu>\n")
    text = {
        "alone": line,
        "before": line + there,
        "after": there + line,
        "between": there[:second] + line + there[second:],
        "cut": there[: there.rindex("\t<gpu id") + 900] + "\n" + line,
    }[at]
    assert first < second
    facts = mutated(commands={**smi(text, 15, listing)})
    assert len(facts.driver.gpus) == {"cut": 6}.get(at, 7)
    fault = only(facts, "gpu.faults")
    assert (fault.level, fault.what) == ("fail", "lost GPU") and where.removeprefix("GPU ") in fault.found
    assert "Xid 79" in fault.fix and "riser" in fault.fix and "reboot" in fault.fix
    shown = only(facts, "gpu.driver")
    assert shown.level == "ok" and str(len(facts.driver.gpus)) in shown.found
    assert "version unknown" not in shown.found
    assert ("fail", "gpu.faults") in bad(facts)
    if where.startswith("0000"):
        lost = [f.found for f in of(facts, "gpu.on-bus")]
        assert not any("0000:45" in found for found in lost), "said once"


def test_every_gpu_off_the_bus() -> None:
    facts = mutated(commands=smi("".join(NO_HANDLE.replace("45", f"{n}5") for n in range(8)), 15))
    assert only(facts, "gpu.faults").level == "fail" and not of(facts, "gpu.driver")
    assert "and 4 more" in only(facts, "gpu.faults").found


def test_an_answer_that_is_cut_off_says_so() -> None:
    text = WHOLE[: WHOLE.rindex("\t<gpu id") + 900]
    facts = mutated(commands={"nvidia-smi-q": Output("ok", text)})
    assert len(facts.driver.gpus) == 7 and ("warn", "gpu.driver") in bad(facts)
    assert ("warn", "gpu.on-bus") in bad(facts)


def test_nvidia_smi_that_hangs_names_the_gpus_before() -> None:
    text = WHOLE[: WHOLE.index("</gpu>\n") + 300]
    hung = {"nvidia-smi-q": Output("hung", text)}
    found = only(mutated(commands={**hung, "torch": Output("hung")}), "gpu.driver")
    assert found.level == "fail" and "it had answered for 0000:05:00.0" in found.found
    slow = only(mutated(commands=hung), "gpu.driver")
    assert slow.level == "warn" and "persistence" in slow.fix, "CUDA starts, so the driver is not stuck"


def test_the_fields_of_newer_drivers() -> None:
    text = WHOLE.replace("cuda_version>", "cuda_umd_version>").replace("_v12.dtd", "_v13.dtd")
    facts = mutated(commands={"nvidia-smi-q": Output("ok", text)})
    assert facts.driver.cuda == "13.0" and bad(facts) == set()


def information(*places: str, model: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition") -> dict[str, str]:
    return {
        f"/proc/driver/nvidia/gpus/{place}/information": f"Model: \t\t {model}\nIRQ:   \t\t 12\n" for place in places
    }


def test_without_nvidia_smi_the_kernel_module_names_the_gpus() -> None:
    gone: dict[str, Any] = {name: Output("missing") for name in smi("")}
    files = information("0000:05:00.0", "0000:25:00.0")
    facts = mutated(commands={**gone, "torch": Output("missing")}, files=files)
    assert [gpu.sm120_capability for gpu in facts.driver.gpus] == [(12, 0), (12, 0)]
    shown = only(facts, "gpu.driver")
    assert shown.level == "warn" and "2 x NVIDIA RTX PRO 6000" in shown.found and "nvidia-utils" in shown.fix
    assert not [f for f in of(facts, "gpu.kind") if "no CUDA GPU" in f.found]
    unknown = mutated(commands=gone, files=information("0000:05:00.0", model="Unknown"))
    assert unknown.driver.gpus == ()


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0)),
        ("NVIDIA RTX PRO 4000 Blackwell SFF Edition", (12, 0)),
        ("NVIDIA RTX PRO 500 Blackwell Generation Laptop GPU", (12, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", (12, 0)),
        ("NVIDIA GB10", (12, 1)),
        ("NVIDIA RTX 5000 Ada Generation", None),
        ("Quadro RTX 5000", None),
        ("NVIDIA B200", None),
        ("NVIDIA GB100", None),
        ("", None),
    ],
)
def test_capability_by_name_where_the_driver_does_not_say_it(name: str, capability: tuple[int, int] | None) -> None:
    unknown = 'Field "compute_cap" is not a valid field to query.\n'
    commands = {
        "nvidia-smi-q": lambda text: re.sub(r"(<product_name>).*?(<)", rf"\g<1>{name}\g<2>", text),
        "nvidia-smi-capability": Output("failed", unknown, 2),
    }
    facts = mutated(commands=commands)
    assert {gpu.sm120_capability for gpu in facts.driver.gpus} == {capability}
    assert facts.sm120_capabilities == ((capability,) if capability else ())


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (Output("ok", "x"), ""),
        (Output("skipped"), ""),
        (Output("missing"), "not found"),
        (Output("hung", "begun"), "it does not answer"),
        (Output("failed", "", 3), "exit status 3"),
        (Output("failed", "<gpu>\n\t<a>1</a>\n\n", -6), "ended by signal SIGABRT"),
        (Output("failed", "", -250), "ended by signal 250"),
        (Output("failed", '{"a": 2}\nTraceback (most recent call last):\n  File\nOSError: gone\n', 1), "OSError: gone"),
        (Output("failed", "<?xml?>\n<gpu>\n\t\t\tNone\n</gpu>\nUnknown  Error\n", 1), "Unknown Error"),
        (Output("failed", "y" * 1000, 1), "y" * 300),
    ],
)  # fmt: skip
def test_why_in_a_line(output: Output, why: str) -> None:
    assert output.why() == why


def test_a_gpu_that_is_lost_between_two_commands() -> None:
    facts = mutated(
        commands={"nvidia-smi-capability": Output("failed", LIST.replace("00000000:45:00.0, 12.0\n", NO_HANDLE))}
    )
    assert "0000:45:00.0" not in [gpu.bus_id for gpu in facts.driver.gpus] and len(facts.driver.gpus) == 7
    assert only(facts, "gpu.faults").level == "fail"
    assert [gpu.index for gpu in facts.driver.gpus] == [0, 1, 3, 4, 5, 6, 7], "as nvidia-smi counts"


def test_what_is_no_lost_gpu() -> None:
    """A field, which belongs to a GPU that answered; a name that only sounds like it; words without a GPU."""
    for line in ("<process_name>GPU 1 has fallen off the bus</process_name>", "GPU 1: well", "a GPU is lost"):
        assert facts_smi.lost([line]) == {}


def test_documents() -> None:
    assert facts_smi.document("").error and facts_smi.document("<nvidia_smi_log>\n<gpu id=").error
    assert facts_smi.document("<nvidia_smi_log><a></b></nvidia_smi_log>").error
    cut = facts_smi.document("<nvidia_smi_log><gpu><a>1</a></gpu><gpu><a>")
    assert cut.root is not None and not cut.whole and len(cut.root) == 1


def test_where_nvidia_smi_ends_at_the_first_lost_gpu_the_kernel_module_has_the_others() -> None:
    files = information("0000:05:00.0", "0000:45:00.0", "0000:e5:00.0")
    facts = mutated(commands=smi(NO_HANDLE, 15), files=files)
    assert [gpu.bus_id for gpu in facts.driver.gpus] == ["0000:05:00.0", "0000:e5:00.0"]
    assert "2 others answer" in only(facts, "gpu.faults").found
    assert "2 x NVIDIA RTX PRO 6000" in only(facts, "gpu.driver").found


def test_torch_tells_the_kind_where_nvidia_smi_fails() -> None:
    facts = mutated(commands=smi(MISMATCH, 18))
    assert facts.driver.gpus == () and facts.sm120_capabilities == ((12, 0),)
