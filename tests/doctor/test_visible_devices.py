"""CUDA_VISIBLE_DEVICES as CUDA reads it, on eight equal GPUs and on two kinds of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutated import mutated
from recorded_machines import facts_of, of

from sglang_sm120.doctor.facts import Facts
from sglang_sm120.doctor.machine import Output

UUIDS = [f"GPU-{n}a2b3c4d-0000-1111-2222-33334444555{n}" for n in range(7)] + [
    "GPU-6a2b3c4d-9999-1111-2222-333344445557"
]


def machine(value: str | None, *, blanked: bool = False, other: tuple[int, ...] = (), order: str = "") -> Facts:
    """other: GPUs that are no SM120; blanked: UUIDs are not known, as in a recording."""
    facts = facts_of()
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    gpus = tuple(
        replace(
            gpu,
            uuid="" if blanked else UUIDS[gpu.index],
            **({"name": "NVIDIA A100 80GB PCIe", "capability": (8, 0)} if gpu.index in other else {}),
        )
        for gpu in facts.driver.gpus
    )
    environ |= {"CUDA_DEVICE_ORDER": order} if order else {}
    return replace(facts, driver=replace(facts.driver, gpus=gpus), environ=environ)


def judged(facts: Facts) -> tuple[str, str]:
    found = of(facts, "environment.visible-devices")
    assert len(found) <= 1
    return (found[0].level, found[0].found) if found else ("", "")


@pytest.mark.parametrize(
    ("value", "level", "says"),
    [
        (None, "", ""),
        ("0,1,2,3,4,5,6,7", "ok", "8 of 8 GPUs"),
        (" 3 , 1 ", "ok", "2 of 8"),
        ("0,1,", "ok", "0,1,: 2 of 8"),
        ("", "fail", "hides every GPU"),
        (" ", "fail", "hides every GPU"),
        (",0", "fail", "hides every GPU"),
        ("-1", "fail", "hides every GPU"),
        ("-1,0", "fail", "hides every GPU"),
        ("NoDevFiles", "fail", "hides every GPU"),
        ("0,-1,2", "fail", "there is no GPU -1 of 8"),
        ("0,8", "fail", "there is no GPU 8 of 8"),
        ("0,0", "fail", "twice"),
        ("all", "fail", "'all' is no number and no UUID"),
        ("0-3", "fail", "'0-3' is no number"),
        ("cuda:0", "fail", "'cuda:0' is no number"),
        ("0;1", "fail", "'0;1' is no number"),
        (UUIDS[3], "ok", "1 of 8"),
        ("GPU-3a2b,GPU-4", "ok", "2 of 8"),
        ("gpu-3A2B", "ok", "1 of 8"),
        ("GPU-3a2b,GPU-3a", "fail", "twice"),
        (f"{UUIDS[3]},3", "fail", "twice"),
        ("GPU-ffff", "fail", "there is no GPU GPU-ffff"),
        ("GPU-6a2b", "fail", "there is no GPU GPU-6a2b"),
        ("MIG-1a2b3c4d-0000-1111-2222-333344445555", "ok", "1 of 8"),
        ("MIG-GPU-1a2b3c4d-0000-1111-2222-333344445555/1/0", "ok", "1 of 8"),
        ("MIG-1a2b,MIG-3c4d", "warn", "a process gets one of them"),
    ],
)
def test_eight_equal_gpus(value: str | None, level: str, says: str) -> None:
    found = judged(machine(value))
    assert found[0] == level and says in found[1]


def test_uuids_that_are_blanked_are_not_judged() -> None:
    for value in ("[uuid],[uuid]", "GPU-3a2b", UUIDS[0], "GPU-[...],GPU-[...]"):
        assert judged(machine(value, blanked=True))[0] == "ok"


@pytest.mark.parametrize(
    ("value", "order", "level", "says"),
    [
        ("2,3", "PCI_BUS_ID", "ok", "2 of 8"),
        ("2,3", "", "note", "counts the fastest GPU first"),
        ("0,1,2,3,4,5,6,7", "", "ok", "8 of 8"),
        ("0,1", "PCI_BUS_ID", "warn", "none of these is an SM120 GPU"),
        ("GPU-0,GPU-1", "", "warn", "none of these is an SM120 GPU"),
        ("GPU-2,GPU-3", "", "ok", "2 of 8"),
        ("GPU-0,GPU-2", "", "ok", "2 of 8"),
    ],
)
def test_two_kinds_of_gpus(value: str, order: str, level: str, says: str) -> None:
    found = judged(machine(value, other=(0, 1), order=order))
    assert found[0] == level and says in found[1]


def test_only_others_are_there() -> None:
    assert judged(machine("0", other=tuple(range(8)))) == ("", ""), "gpu.kind says it"


def test_where_a_gpu_is_lost_numbers_are_not_judged() -> None:
    facts = machine("0,1,2,3,4,5,6,7")
    lost = replace(facts.driver, gpus=facts.driver.gpus[:7], lost=(("0000:e5:00.0", "Unknown Error"),))
    assert judged(replace(facts, driver=lost)) == ("", "")


def test_uuids_are_read_and_kept_out_of_recordings() -> None:
    text = f"<nvidia_smi_log><gpu id='00000000:01:00.0'><uuid>{UUIDS[0]}</uuid></gpu></nvidia_smi_log>"
    (gpu,) = mutated(commands={"nvidia-smi-q": Output("ok", text)}).driver.gpus
    assert gpu.uuid == UUIDS[0]
    assert not any(gpu.uuid for gpu in facts_of().driver.gpus)
