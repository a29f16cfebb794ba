"""Nothing that says whose machine it is survives; what a bug report needs does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_machines import MACHINES, NAMES

from sglang_sm120.doctor.redact import Identity, redact, redact_all

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
        ("<process_name>/data/acme_trainer --x</process_name>", "acme"),
        ("<process_name>acme_trainer</process_name>", "acme"),
        ("GPU-3f9c", "3f9c"),
        ("CUDA_VISIBLE_DEVICES: 'GPU-3f9c1e,MIG-41b7': 2 GPUs", "41b7"),
        ("MIG-GPU-529b3263-c96d-b557-bc75-697f04917eda/3/0", "529b3263"),
        ("GPU-529b3263-c96d", "c96d"),
        ("token hf_AbCdEfGhIjKlMnOp", "AbCdEf"),
        ("sk-proj-1234567890abcdef", "1234567890"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN"),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "16C7e42F"),
        ("github_pat_11ABCDEFG0abcdefghij_k", "ABCDEFG"),
        ("Authorization: Bearer abc.def-ghi_jkl", "abc.def"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.SflKxwRJSM", "SflKxw"),
        ("--api-key swordfish", "swordfish"),
        ("password=hunter2", "hunter2"),
        ('{"api_key": "swordfish"}', "swordfish"),
        ("https://ann:hunter2@proxy.acme.com:3128/", "hunter2"),
        ("proxy ann:hunter2@10proxy:3128", "hunter2"),
        ("ann:hunter2@box", "hunter2"),
        ("serving on gpu7.cluster.acme.com:8000", "acme"),
        ("gpu7.rack.internal", "rack"),
        ("hostname: othermachine", "othermachine"),
        ("<hostname>othermachine</hostname>", "othermachine"),
        ("::ffff:192.168.17.4", "17.4"),
        ("::ffff:192.168.17.4", "192.168"),
        ("[::ffff:192.168.17.4]:30000", "168"),
        ("64:ff9b::192.168.17.4", "17.4"),
        ("inet6 addr:fe80::3eec:efff:fe12:3456", "3eec"),
        ("::1:2:3eec", "3eec"),
        ("enx3cecef123456: up", "3cecef"),
        ("3cec.ef12.3456", "ef12"),
        ("/home/ann lee/models/x", "lee"),
        ("'/home/ann lee'", "lee"),
        ("/Users/Ann Lee/Library/x and Ann Lee again", "Lee"),
        ("/mnt/acme secret/big model/x.safetensors", "secret"),
        ("/mnt/acme secret/big model/x.safetensors", "model"),
        ('"/mnt/acme secret"', "secret"),
        ("/run/user/1000/acme", "acme"),
        ("/run/media/ann/stick", "ann"),
        ("/dev/shm/acme-buffers", "acme"),
        ("/dev/disk/by-id/nvme-Samsung_S5GXNF0R", "S5GXNF0R"),
        ("/usr/local/acme/bin/nvcc", "acme"),
        ("/etc/acme.conf", "acme"),
        ("g++ -isystem /mnt/acme/include -B/opt/acme", "acme"),
        ("~/acme/models", "acme"),
        ("~ann/models", "ann"),
        (r"C:\Users\ann\models", "ann"),
        ("0::/system.slice/acme-llm.service", "acme"),
        ("4:memory:/kubepods/burstable/pod529b3263/acme", "acme"),
        ("12:pids:/slurm/uid_1000/job_77", "uid_1000"),
        ("=== /sys/fs/cgroup/system.slice/acme-llm.service/memory.max", "acme"),
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
        "GPU-to-GPU, GPU 0-1, GPU0 and GPU-accelerated; MIG 1g.24gb",
        "c10::cuda torch::jit at::native 580.95.05 12.8.90 9.10.2",
        "/dev/shm, /dev/nvidia0, /dev/infiniband/uverbs0, /usr/local/cuda-13.0/bin/nvcc, /etc/modprobe.d/nvidia.conf",
        "=== /sys/fs/cgroup/memory/docker/[...]/memory.limit_in_bytes",
        "0::/docker/[...]",
        "0::/user.slice",
        "/run/.containerenv /run/systemd/container /var/run/secrets/kubernetes.io /.dockerenv",
        "pip install nvidia-cuda-nvrtc==13.0.88 sglang-kernel==0.4.10; libcudart.so.13, build.ninja",
        "developer.nvidia.com/cuda-downloads, docs.pytorch.org and github.com/microsoft/mscclpp",
        "risk-free task-based disk-full",
        "3 layer shapes at 12, 14 token counts; a registry key of the driver",
        "0000:05:00.0: DMA-FQ, 0000:c1:00.0: 256 MiB",
        "[uuid 1],[uuid 2] [token] [program] [...]",
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


_ORDINARY = (
    "dev", "data", "root", "tmp", "sys", "proc", "shm", "usr", "pci", "devices", "bus", "nvidia", "cgroup", "port",
    "memory", "version", "gpu", "ok", "environ", "python", "packages", "links", "run", "etc", "12", "a", "express",
)  # fmt: skip


@pytest.mark.parametrize("who", [Identity(users=_ORDINARY), Identity(hosts=_ORDINARY)], ids=["users", "hosts"])
def test_names_that_are_words_spoil_no_path_and_no_recording(who: Identity) -> None:
    for text in (
        "/dev/shm",
        "=== /sys/bus/pci/devices/0000:05:00.0/vendor",
        "/proc/driver/nvidia/params",
        "/usr/bin/x",
    ):
        assert redact(text, who) == text
    for name in NAMES:
        parts = {path.name: path.read_text() for path in (MACHINES / name).iterdir() if "expected" not in path.name}
        blanked = redact_all(parts, who)
        assert json.loads(blanked.pop("machine.json")) == json.loads(parts.pop("machine.json"))
        assert blanked == parts


@pytest.mark.parametrize("user", ["kvmuser", "sysop", "capacity", "minor", "numeric", "processes", "serial_x", "board"])
def test_a_name_within_tags_and_keys_leaves_them_whole(user: str) -> None:
    """A name that is neither common nor long: what it must not break is the form of the files."""
    who = Identity(users=(user,), hosts=(user,))
    for name in NAMES:
        parts = {path.name: path.read_text() for path in (MACHINES / name).iterdir() if "expected" not in path.name}
        blanked = redact_all(parts, who)
        assert json.loads(blanked["machine.json"]).keys() == json.loads(parts["machine.json"]).keys()
        if "nvidia-smi-q.txt" in parts:
            tree = ElementTree.fromstring(blanked["nvidia-smi-q.txt"])
            assert [each.tag for each in tree.iter()] == [
                each.tag for each in ElementTree.fromstring(parts["nvidia-smi-q.txt"]).iter()
            ]
        keys = [line for line in blanked["files.txt"].splitlines() if line.startswith("===")]
        assert keys == [line for line in parts["files.txt"].splitlines() if line.startswith("===")]


def test_secrets_of_the_environment_are_blanked_wherever_they_are() -> None:
    who = Identity(secrets=("correct-horse",))
    assert redact("--x=correct-horse, xcorrect-horsey", who) == "--x=[...], x[...]y"


def test_secrets_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "correct-horse")
    monkeypatch.setenv("SHORT_KEY", "1")
    found = Identity.of_this_machine().secrets
    assert "correct-horse" in found and "1" not in found


def test_a_program_that_one_part_names_is_blanked_in_all() -> None:
    parts = {"q": "<process_name>/data/acme_trainer x</process_name><process_name>/usr/bin/python3 y</process_name>",
             "found": "acme_trainer (process 7) on GPU 0, python3"}  # fmt: skip
    assert redact_all(parts, Identity()) == {
        "q": "<process_name>[program]</process_name><process_name>python3</process_name>",
        "found": "[program] (process 7) on GPU 0, python3",
    }


@pytest.mark.parametrize(
    "piece", ["a", "ab", "a.", "ab:", "/a", "b ", "1.", "a-", "key = ", "'/a ", "GPU-aa-", "<a ", "a:b"]
)
def test_long_texts_take_no_longer_than_their_length(piece: str) -> None:
    text = piece * (20_000 // len(piece))
    times = []
    for _ in range(2):
        started = time.monotonic()
        redact(text, WHO)
        times.append(time.monotonic() - started)
    assert min(times) < 1.5


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
    st.lists(st.integers(1, 255), min_size=4, max_size=4).map(
        lambda p: ("::ffff:" + ".".join(map(str, p)), ".".join(map(str, p)))
    ),
    _hex(12).map(lambda p: (f"GPU-{p[:8]}-{p[8:]}", p[8:])),
    _WORD.map(lambda w: (f"hf_{w}{w}", w)),
    _WORD.map(lambda w: (f"ann:{w}@proxy:80", w)),
    _WORD.map(lambda w: (f"node1.{w}.com", w)),
    st.tuples(_WORD, _WORD).map(lambda w: (f"/home/{w[0]} {w[1]}/x", w[1])),
    st.tuples(_WORD, _WORD).map(lambda w: (f"/mnt/{w[0]} {w[1]}/x", w[1])),
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
    of = {"path": "/home/kurt lee/x", "ip": "10.1.2.3", "n": 1, "mwagner": None, "quote": '"/home/kurt" \\ mwagner',
          "/home/kurt lee/y": ["/usr/lib", "mwagner"]}  # fmt: skip
    blanked = {"path": "[home]", "ip": "[ip]", "n": 1, "mwagner": None, "quote": '"[home]" \\ [user]',
               "[home]": ["/usr/lib", "[user]"]}  # fmt: skip
    assert json.loads(redact_all({"machine.json": json.dumps(of)}, WHO)["machine.json"]) == blanked


def test_this_machine_knows_its_names() -> None:
    who = Identity.of_this_machine()
    assert Path("~").expanduser().name in who.users
    assert who.hosts
