"""GPUs in trouble, as nvidia-smi words them: each is named with its fix, and nothing else cries."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from mutated import Mutated, every_field, in_gpu, mutated
from recorded_machines import HEALTHY, MACHINES, bad, of, only

from sglang_sm120.doctor.checks import judge, run_checks
from sglang_sm120.doctor.machine import Output

WHOLE = (MACHINES / HEALTHY / "nvidia-smi-q.txt").read_text()


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
    ("warn", "ecc_errors", "<unrepairable_memory>Yes</unrepairable_memory>", "could not be replaced", "replaced"),
    ("warn", "ecc_errors", "<channel_repair_pending>Yes</channel_repair_pending>", "next reset", "--gpu-reset"),
    ("warn", "ecc_errors", "<tpc_repair_pending>Yes</tpc_repair_pending>", "next reset", "--gpu-reset"),
    ("warn", "dram_uncorrectable", "2", "2 uncorrectable", "reboot"),
    ("fail", "gpu_temp", "Unknown Error", "'Unknown Error'", "reboot"),
    ("fail", "gpu_util", "ERR!", "'ERR!'", "reboot"),
]


def later_ecc(field: str) -> Callable[[str], str]:
    """What newer drivers add to the table of errors, on GPU 2."""

    def change(text: str) -> str:
        parts = text.split("</ecc_errors>")
        return "</ecc_errors>".join([*parts[:2], parts[2] + field, *parts[3:]])

    return change


@pytest.mark.parametrize(("level", "tag", "value", "says", "fix"), FAULTS)
def test_one_gpu_with_a_fault(level: str, tag: str, value: str, says: str, fix: str) -> None:
    change = in_gpu(2, tag, value)
    if tag == "reset_required":  # of drivers before 565
        change = in_gpu(2, "gpu_reset_status", "<reset_required>Yes</reset_required>")
    if tag == "ecc_errors":
        change = later_ecc(value)
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
    assert {f.level for f in of(facts, "gpu.kind")} == {"ok"}, "it is no other kind of GPU"


def test_what_the_driver_asks_for_covers_what_is_pending() -> None:
    text = in_gpu(2, "remapped_row_pending", "Yes")(in_gpu(2, "gpu_recovery_action", "Drain and Reset")(WHOLE))
    assert only(mutated(commands={"nvidia-smi-q": Output("ok", text)}), "gpu.faults").what == "GPU recovery"


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


@pytest.mark.parametrize(
    ("kind", "cgroup", "level"),
    [
        ("C", "0::/user.slice/user-1000.slice/session-3.scope\n", "warn"),
        ("C", "", "warn"),
        ("C", "0::/system.slice/ollama.service\n", "note"),
        ("C+G", "0::/user.slice/user-1000.slice/session-3.scope\n", "note"),
    ],
)
def test_services_and_screens_are_not_left_over(kind: str, cgroup: str, level: str) -> None:
    process = f"<process_info><pid>77</pid><type>{kind}</type><process_name>/bin/ollama</process_name></process_info>"
    text = WHOLE.replace("<processes>", f"<processes>{process}", 1)
    files = {"/proc/77/status": "Name:\tollama\nPPid:\t1\n", "/proc/77/cgroup": cgroup}
    found = only(mutated(commands={"nvidia-smi-q": Output("ok", text)}, files=files), "gpu.processes")
    assert found.level == level and ("service ollama.service" in found.found) == ("system" in cgroup)


FIELDS = sorted(set(re.findall(r"<(\w+)>[^<]*</\1>", WHOLE)) - {"driver_version", "timestamp"})


def everywhere(tag: str, value: str) -> str:
    return re.sub(rf"(<{tag}>)[^<]*(</{tag}>)", rf"\g<1>{value}\g<2>", WHOLE)


@pytest.mark.parametrize(
    "value", ["N/A", "[N/A]", "[Not Supported]", "Requested functionality has been deprecated", ""]
)
def test_what_a_driver_does_not_say_is_no_fault(value: str) -> None:
    """Each field in turn, on every GPU: as with virtual GPUs, in WSL, with other drivers."""
    for tag in FIELDS:
        facts = mutated(commands={"nvidia-smi-q": Output("ok", everywhere(tag, value))})
        assert bad(facts) == set(), tag


@pytest.mark.parametrize("value", ["[Unknown Error]", "ERR!", "-1", "9" * 30, "0", "x16", "Yes", "Enabled", "\udcff"])
def test_odd_values_break_no_check(value: str) -> None:
    for tag in FIELDS:
        facts = mutated(commands={"nvidia-smi-q": Output("ok", everywhere(tag, value))})
        assert not [finding for finding in judge(facts) if finding.what.startswith("check ")], tag


def test_other_gpus_beside_are_not_judged() -> None:
    """A card for the screen in a narrow slot, with a power limit, heat and windows on it."""
    process = "<processes><process_info><pid>5</pid><type>C</type><process_name>x</process_name></process_info>"
    text = in_gpu(0, "current_link_width", "4x")(WHOLE)
    text = in_gpu(0, "product_name", "NVIDIA RTX A400")(text)
    text = in_gpu(0, "current_power_limit", "40.00 W")(text)
    text = in_gpu(0, "clocks_event_reason_hw_slowdown", "Active")(text).replace("<processes>", process, 1)
    listing = (MACHINES / HEALTHY / "nvidia-smi-capability.txt").read_text().replace("12.0", "8.6", 1)
    commands = {"nvidia-smi-q": Output("ok", text), "nvidia-smi-capability": Output("ok", listing)}
    facts = mutated(commands=commands)
    assert bad(facts) == set(), "torch has SM120 GPUs only, so the other is hidden from it"
    assert not of(facts, "gpu.processes") and "RTX A400" in of(facts, "gpu.kind")[0].found
    commands["nvidia-smi-q"] = Output("ok", in_gpu(0, "gpu_recovery_action", "Reset")(text))
    assert bad(mutated(commands=commands)) == {("fail", "gpu.faults")}
