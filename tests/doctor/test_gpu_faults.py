"""GPUs and drivers in trouble, as nvidia-smi words them: each named with its fix, and what is well still shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from mutated import Mutated, every_field, in_gpu, mutated, without_gpu
from recorded_machines import HEALTHY, MACHINES, bad, of

from sglang_sm120.doctor import facts_smi
from sglang_sm120.doctor.checks import run_checks
from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.machine import Output
from sglang_sm120.findings import Finding

WHOLE = (MACHINES / HEALTHY / "nvidia-smi-q.txt").read_text()
LIST = (MACHINES / HEALTHY / "nvidia-smi-capability.txt").read_text()
NO_HANDLE = "Unable to determine the device handle for GPU0000:45:00.0: Unknown Error\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.105\n"
NO_MODULE = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


def smi(text: str, code: int = 255, listing: str | None = None) -> dict[str, Output]:
    """nvidia-smi that fails with this text, whatever it is asked for."""
    failed = Output("failed", text, code)
    commands = dict.fromkeys(("nvidia-smi-q", "nvidia-smi-topo", "nvidia-smi-p2p"), failed)
    return commands | {"nvidia-smi-capability": failed if listing is None else Output("failed", listing, code)}


def only(facts: Facts, check: str) -> Finding:
    (found,) = of(facts, check)
    return found


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
    facts = mutated(commands={**smi(text, code), "torch": Output("ok", blind)})
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
    found = only(mutated(commands={"nvidia-smi-q": Output("hung", text)}), "gpu.driver")
    assert found.level == "fail" and "it had answered for 0000:05:00.0" in found.found


FAULTS: list[tuple[str, str, str, str, str]] = [
    # level, tag, value, what the finding says, what the fix says
    ("fail", "gpu_recovery_action", "Reset", "'Reset'", "nvidia-smi --gpu-reset -i 0000:45:00.0"),
    ("fail", "gpu_recovery_action", "Reboot", "'Reboot'", "reboot"),
    ("fail", "gpu_recovery_action", "Drain P2P", "'Drain P2P'", "between GPUs"),
    ("warn", "gpu_recovery_action", "Drain and Reset", "'Drain and Reset'", "--gpu-reset"),
    ("fail", "gpu_recovery_action", "GPU Reset Bus", "'GPU Reset Bus'", "reboot"),
    ("fail", "reset_required", "Yes", "", ""),
    ("warn", "remapped_row_pending", "Yes", "at the next reset", "--gpu-reset -i 0000:45:00.0"),
    ("warn", "remapped_row_failure", "Yes", "could not be replaced", "replaced"),
    ("warn", "dram_uncorrectable", "2", "2 uncorrectable", "reboot"),
    ("fail", "gpu_temp", "Unknown Error", "'Unknown Error'", "reboot"),
    ("fail", "gpu_util", "ERR!", "'ERR!'", "reboot"),
]


@pytest.mark.parametrize(("level", "tag", "value", "says", "fix"), FAULTS)
def test_one_gpu_with_a_fault(level: str, tag: str, value: str, says: str, fix: str) -> None:
    change = in_gpu(2, tag, value)
    if tag == "reset_required":  # of drivers before 565
        change = in_gpu(2, "gpu_reset_status", "<reset_required>Yes</reset_required>")
    facts = mutated(commands={"nvidia-smi-q": change})
    found = only(facts, "gpu.faults")
    assert (found.level, "GPU 2 (0000:45:00.0)" in found.found) == (level, True)
    assert says in found.found and fix in found.fix
    assert bad(facts) == {(level, "gpu.faults")}


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("gpu_recovery_action", "None"),
        ("gpu_recovery_action", "N/A"),
        ("gpu_reset_status", "<reset_required>Requested functionality has been deprecated</reset_required>"),
        ("remapped_row_pending", "N/A"),
        ("dram_uncorrectable", "N/A"),
        ("dram_uncorrectable", "[Not Supported]"),
        ("dram_correctable", "12"),
        ("fan_speed", "[Unknown Error]"),
        ("average_power_draw", "ERR!"),
        ("current_power_limit", "[Unknown Error]"),
        ("persistence_mode", "[N/A]"),
        ("current_ecc", "[N/A]"),
        ("pending_ecc", "[N/A]"),
        ("compute_mode", "[N/A]"),
        ("current_link_gen", "[Unknown Error]"),
        ("gpu_util", "[N/A]"),
    ],
)
def test_what_is_no_fault_of_a_gpu(tag: str, value: str) -> None:
    facts = mutated(commands={"nvidia-smi-q": in_gpu(2, tag, value)})
    assert bad(facts) == set()
    assert only(facts, "gpu.faults").level == "ok"


@pytest.mark.parametrize(
    ("words", "fix"), [("GPU requires reset", "--gpu-reset -i 0000:45:00.0"), ("GPU is lost", "Xid 79")]
)
@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_words_in_every_field(words: str, fix: str, form: str) -> None:
    facts = mutated(commands={"nvidia-smi-q": every_field(2, form.format(words))})
    found = only(facts, "gpu.faults")
    assert found.level == "fail" and words in found.found and fix in found.fix
    assert bad(facts) == {("fail", "gpu.faults")}


def test_a_damaged_inforom_is_a_note() -> None:
    """nvidia-smi ends with status 14, and everything is there."""
    text = WHOLE + "WARNING: infoROM is corrupted at gpu 0000:45:00.0\n"
    facts = mutated(commands={"nvidia-smi-q": Output("failed", text, 14)})
    assert bad(facts) == set() and len(facts.driver.gpus) == 8
    assert (only(facts, "gpu.faults").level, only(facts, "gpu.faults").what) == ("note", "infoROM")


def test_names_of_processes_that_are_no_xml() -> None:
    name = "/opt/a --x=<defunct> &amp; & \x01"
    process = f"<process_info><pid>7</pid><type>C</type><process_name>{name}</process_name></process_info>"
    text = WHOLE.replace("<processes>", f"<processes>{process}", 1)
    facts = mutated(commands={"nvidia-smi-q": Output("ok", text)})
    assert [(p.pid, p.name, p.used_mib) for p in facts.driver.gpus[0].processes] == [(7, "a", None)]
    assert "a (process 7) on GPU 0, memory not shown" in only(facts, "gpu.processes").found


def test_thousands_of_processes() -> None:
    one = "<process_info><pid>{}</pid><type>C</type><process_name>[Not Found]</process_name></process_info>"
    text = WHOLE.replace("<processes>", "<processes>" + "".join(one.format(n) for n in range(2, 5002)), 1)
    asked: list[str] = []

    class Asked(Mutated):
        def text(self, path: str) -> str:
            asked.append(path)
            return super().text(path)

    findings = run_checks(Asked(commands={"nvidia-smi-q": Output("ok", text)}))
    assert len([path for path in asked if path.endswith("/status")]) < 100
    (found,) = [f for f in findings if f.check == "gpu.processes"]
    assert "and 4996 more" in found.found and len(found.found) < 500


def test_mig() -> None:
    part = "<mig_device><index>{}</index><fb_memory_usage><total>24 MiB</total></fb_memory_usage></mig_device>"
    on = in_gpu(0, "current_mig", "Enabled")(WHOLE)
    none = only(mutated(commands={"nvidia-smi-q": Output("ok", on)}), "gpu.mode")
    assert none.level == "warn" and "no part is made" in none.found
    made = on.replace("</mig_mode>", f"</mig_mode><mig_devices>{part.format(0)}{part.format(1)}</mig_devices>", 1)
    facts = mutated(commands={"nvidia-smi-q": Output("ok", made)})
    assert "2 parts" in only(facts, "gpu.mode").found and facts.driver.gpus[0].memory_mib == 97887


@pytest.mark.parametrize(("status", "level"), [("Unlicensed (Unrestricted)", "warn"), ("Licensed (Expiry: N/A)", "")])
def test_a_virtual_gpu_without_a_licence(status: str, level: str) -> None:
    product = f"<license_status>{status}</license_status>"
    facts = mutated(commands={"nvidia-smi-q": in_gpu(0, "vgpu_software_licensed_product", product)})
    assert bad(facts) == ({(level, "gpu.mode")} if level else set())


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


def test_documents() -> None:
    assert facts_smi.document("").error and facts_smi.document("<nvidia_smi_log>\n<gpu id=").error
    assert facts_smi.document("<nvidia_smi_log><a></b></nvidia_smi_log>").error
    cut = facts_smi.document("<nvidia_smi_log><gpu><a>1</a></gpu><gpu><a>")
    assert cut.root is not None and not cut.whole and len(cut.root) == 1
