"""Nothing that says whose machine it is survives; what a bug report needs does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_machines import MACHINES, NAMES

from sglang_sm120.doctor.redact import Identity, kernel_arguments, redact, redact_all, variables

WHO = Identity(hosts=("gpubox-17.lab.example.org", "gpubox-17"), users=("mwagner",))


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Linux gpubox-17 6.8.0", "gpubox-17"),
        ("gpubox-17.lab.example.org:8000", "lab.example"),
        ("GPUBOX-17 up", "GPUBOX"),
        ("owner mwagner, pid 3", "mwagner"),
        ("/scratch/mwagner_models", "mwagner"),
        ("File /home/kurt/venv/lib/python3.12/site-packages/torch/x.so", "kurt"),
        ("/Users/kurt/x and kurt again", "kurt"),
        ("/root/keys/id", "keys"),
        ("/mnt/acme-secret/models/glm", "acme"),
        ("PATH=/opt/acme/bin:/data/acme/bin", "acme"),
        ("<uuid>GPU-529b3263-c96d-b557-bc75-697f04917eda</uuid>", "529b3263"),
        ("GPU-529b3263-c96d-b557-bc75-697f04917eda", "697f04917eda"),
        ("root=UUID=529b3263-c96d-b557-bc75-697f04917eda", "529b3263"),
        ("<serial>1325017001234</serial>", "1325017001234"),
        ("<chassis_serial_number>AB-99</chassis_serial_number>", "AB-99"),
        ("Serial Number : 1325017001234", "1325017001234"),
        ("Capabilities: [148 v1] Device Serial Number 48-b0-2d-ff-fe-12-34-56", "12-34-56"),
        ("link/ether 3c:ec:ef:12:34:56 brd", "3c:ec:ef"),
        ("inet 192.168.17.4/24, 10.0.0.7.", "192.168"),
        ("inet 192.168.17.4/24, 10.0.0.7.", "10.0.0.7"),
        ("[fe80::3eec:efff:fe12:3456]", "3eec"),
        ("2001:db8:85a3:1:2:8a2e:370:7334", "8a2e"),
        ("mail me: k.w@example.org", "k.w@"),
        ("0::/docker/9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "9f86d081"),
        ("<process_name>/usr/bin/python3 -m x --api-key sk-12345</process_name>", "sk-12345"),
    ],
)
def test_planted_secrets(text: str, secret: str) -> None:
    assert secret in text
    assert secret.lower() not in redact(text, WHO).lower()


@pytest.mark.parametrize(
    "text",
    [
        "driver 580.95.05 (CUDA 13.0), NVRTC 13.0.88, nccl 2.28.9, torch 2.14.1+cu130",
        "0000:c1:00.0 and 00000000:C1:00.0",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "=== /sys/bus/pci/devices/0000:05:00.0/vendor",
        "=== /proc/driver/nvidia/params",
        "push 54.0 GB/s, 0.45 us / pull; read/write",
        "sglang::scheduler_TP2 torch::cuda std::vector",
        "<gpu id=\"00000000:05:00.0\">\n</gpu>",
        "fix: nvidia-smi -q; docker run --ipc=host",
        "/usr/local/cuda/bin/nvcc",
        "Mon Jan  5 10:00:00 2026",
        "ACSCtl: SrcValid+ ReqRedir+",
        "https://github.com/microsoft/mscclpp",
        "~/.cache/flashinfer (or FLASHINFER_WORKSPACE_BASE)",
        "0x00000000a0000000 0x00000000a3ffffff 0x0000000000040200",
    ],
)  # fmt: skip
def test_what_is_needed_stays(text: str) -> None:
    assert redact(text, WHO) == text


def test_what_is_left_of_a_path_into_packages() -> None:
    text = redact("/home/kurt/venv/lib/python3.12/site-packages/sglang/srt and /data/x/site-packages/torch", WHO)
    assert text == "[home]/site-packages/sglang/srt and [path]/site-packages/torch"


def test_names_that_one_part_gives_away_are_blanked_in_all() -> None:
    parts = redact_all({"a": "/home/kurt/x", "b": "owner: kurt; kurtosis"}, Identity())
    assert parts == {"a": "[home]", "b": "owner: [user]; kurtosis"}


def test_common_names_are_words() -> None:
    assert redact("nvidia-smi on ubuntu, root", Identity(hosts=("ubuntu",), users=("nvidia", "root"))) == (
        "nvidia-smi on ubuntu, root"
    )


def test_kernel_arguments() -> None:
    line = "BOOT_IMAGE=/vmlinuz root=UUID=1 ro iommu=pt amd_iommu=on ip=10.1.1.1 luks=secret pci=realloc customername"
    assert kernel_arguments(line) == (
        "BOOT_IMAGE=[...] root=[...] ro iommu=pt amd_iommu=on ip=[...] luks=[...] pci=realloc"
    )


def test_variables_that_sound_secret() -> None:
    given = {"SGLANG_API_KEY": "sk-1", "NCCL_DEBUG": "INFO", "TORCH_HF_TOKEN": "hf_1"}
    assert variables(given) == {"SGLANG_API_KEY": "[...]", "NCCL_DEBUG": "INFO", "TORCH_HF_TOKEN": "[...]"}


_HEX = "0123456789abcdef"
_WORD = st.text("bcdfghjklmnpqrstvwxz", min_size=6, max_size=10)


def _hex(count: int) -> st.SearchStrategy[str]:
    return st.text(_HEX, min_size=count, max_size=count)


_PLANTED = st.one_of(
    st.tuples(*(_hex(n) for n in (8, 4, 4, 4, 12))).map(lambda p: ("GPU-" + "-".join(p), "-".join(p))),
    st.lists(_hex(2), min_size=6, max_size=6).map(lambda p: (":".join(p), ":".join(p))),
    st.lists(st.integers(1, 255), min_size=4, max_size=4).map(lambda p: (".".join(map(str, p)),) * 2),
    st.lists(_hex(4), min_size=8, max_size=8).map(lambda p: (":".join(p), ":".join(p))),
    _WORD.map(lambda w: (f"/home/{w}/models/x", w)),
    _WORD.map(lambda w: (f"/mnt/{w}/x.safetensors", w)),
    _WORD.map(lambda w: (f"<serial>{w}</serial>", w)),
    st.lists(_hex(2), min_size=8, max_size=8).map(lambda p: ("Device Serial Number " + "-".join(p), "-".join(p))),
    st.just(("gpubox-17", "gpubox-17")),
    st.just(("mwagner", "mwagner")),
)
_AROUND = st.sampled_from(["", " ", "\t", "\n", '"', "'", "(", ")", ",", ";", "=", ": ", " [", "] ", "<td>", "</td>"])


@given(st.lists(st.tuples(_AROUND, _PLANTED, _AROUND), min_size=1, max_size=8))
def test_no_planted_token_survives(pieces: list[tuple[str, tuple[str, str], str]]) -> None:
    text = "\n".join(before + planted + after for before, (planted, _), after in pieces)
    blanked = redact(text, WHO)
    for _, (_, secret), _ in pieces:
        assert secret not in blanked
    assert redact(blanked, WHO) == blanked, "again changes nothing"


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machines_are_anonymous(name: str) -> None:
    for path in (MACHINES / name).iterdir():
        text = path.read_text()
        parts = redact_all({"": text}, Identity())
        assert parts[""] == text, f"{path.name} holds what ought to be blanked"


def test_json_stays_json() -> None:
    text = json.dumps({"path": "/home/kurt/x", "ip": "10.1.2.3", "n": 1}, indent=1)
    assert json.loads(redact(text, WHO)) == {"path": "[home]", "ip": "[ip]", "n": 1}


def test_this_machine_knows_its_names() -> None:
    who = Identity.of_this_machine()
    assert Path("~").expanduser().name in who.users
    assert who.hosts
