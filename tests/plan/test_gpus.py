"""The table of GPUs, sizes as --gpu, and what is made of nvidia-smi's answers."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from sglang_sm120.errors import ConfigError
from sglang_sm120.plan import gpus
from sglang_sm120.plan.gpus import GIB, GPUS, HELD_BACK_BYTES, MIB, detect, find

PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887, 12.0"
RTX_5090 = "NVIDIA GeForce RTX 5090, 32607, 12.0"


def answering(text: str):
    def ask(command: Sequence[str]) -> str:
        assert command[0] == "nvidia-smi"
        assert not any("set" in word or "reset" in word for word in command), "it only reads"
        return text

    return ask


def test_the_table_is_plausible() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        held_back = gpu.shown_bytes - gpu.cuda_bytes
        assert 400 * MIB < held_back < 700 * MIB, f"{gpu.name}: CUDA has a little less than nvidia-smi shows"
        assert gpu.source
        assert gpu.is_sm120 == (gpu.name != "h200")


def test_sizes_that_public_messages_have() -> None:
    # torch: "total capacity of 94.97 GiB", "31.37 GiB", "139.80 GiB"; nvidia-smi: 97887MiB, 32607MiB, 143771MiB
    assert round(find("rtx-pro-6000").cuda_bytes / GIB, 2) == 94.97
    assert find("rtx-pro-6000-max-q").shown_bytes == 97_887 * MIB
    assert round(find("RTX_5090").cuda_bytes / GIB, 2) == 31.37
    assert find("rtx-5090").p2p is False
    assert find("h200").shown_bytes == 143_771 * MIB


@pytest.mark.parametrize(
    ("text", "size"), [("96GiB", 96 * 2**30), ("96 gib", 96 * 2**30), ("24GB", 24 * 10**9), ("97887MiB", 97887 * 2**20)]
)
def test_a_size_is_taken_at_its_word(text: str, size: int) -> None:
    gpu = find(text)
    assert gpu.cuda_bytes == gpu.shown_bytes == size
    assert gpu.p2p is None


@pytest.mark.parametrize("text", ["", "rtx-6000", "0GiB", "9999GiB", "96", "-1GiB", "96GiB,", "1e9GiB", "nan"])
def test_unknown_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(text)
    assert error.value.fix
    assert len(str(error.value).splitlines()) == 3


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean rtx-5090"):
        find("rtx5090")


def test_of_mixed_gpus_the_smallest_counts_and_it_says_so() -> None:
    gpu = find("rtx-pro-6000,rtx-5090")
    assert gpu.cuda_bytes == find("rtx-5090").cuda_bytes
    assert "smallest" in gpu.note
    assert "RTX PRO 6000" in gpu.note
    assert gpu.p2p is False


def test_detect_takes_name_and_number_from_nvidia_smi() -> None:
    found = detect(answering(f"{PRO_6000}\n" * 4))
    assert (found.gpu, found.count) == (find("rtx-pro-6000"), 4)
    mixed = detect(answering(f"{PRO_6000}\n{RTX_5090}\n"))
    assert (mixed.gpu.title, mixed.count) == ("GeForce RTX 5090", 2)
    assert "mixed" in mixed.gpu.note


def test_detect_serves_gpus_that_are_not_in_the_table() -> None:
    gpu = detect(answering("NVIDIA H100, 80GB, PCIe, 81559, 9.0\n")).gpu
    assert (gpu.title, gpu.shown_bytes, gpu.is_sm120) == ("H100, 80GB, PCIe", 81_559 * MIB, False)
    assert gpu.cuda_bytes == gpu.shown_bytes - HELD_BACK_BYTES
    assert "guess" in gpu.source


@pytest.mark.parametrize("answer", ["", "\n", "NVIDIA GB10, [N/A], 12.1\n", "No devices were found\n", "a, 0, 12.0"])
def test_answers_that_cannot_be_read(answer: str) -> None:
    with pytest.raises(ConfigError, match="nvidia-smi"):
        detect(answering(answer))


def test_no_nvidia_smi_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(gpus.subprocess, "run", missing)
    with pytest.raises(ConfigError, match="there is no nvidia-smi here") as error:
        detect()
    assert "--gpu rtx-pro-6000" in error.value.fix


def test_an_nvidia_smi_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 9, "", "NVIDIA-SMI has failed because it couldn't communicate\nmore")
    monkeypatch.setattr(gpus.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(ConfigError, match=r"ended with 9.*couldn't communicate"):
        detect()
