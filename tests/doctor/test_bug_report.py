"""The report and the recording: nothing private is in them, all that is needed is, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_machines import HEALTHY, MACHINES, arguments

from sglang_sm120 import cli
from sglang_sm120.doctor import command, redact
from sglang_sm120.doctor.machine import Output, Recording

SWITCH = "switch-4-rtx-pro-6000-acs"

PLANTED = {
    "host": "gpubox-17",
    "domain": "lab.acme.example",
    "user": "mwagner",
    "serial": "1325017009871",
    "uuid": "529b3263-c96d-b557-bc75-697f04917eda",
    "mac": "3c:ec:ef:12:34:56",
    "ip": "192.168.17.4",
    "pci serial": "48-b0-2d-ff-fe-12-34-56",
    "model": "acme-secret-model",
    "key": "sk-31337",
    "other host": "builder-5",
    "program": "acme-trainer",
    "uid": "4711",
    "hugging face": "hf_AbCdEfGhIjKlMn",
    "group": "acme-llm.service",
}


class Planted(Recording):
    """The switch box with everything in its texts that a real one has and nobody should see."""

    def __init__(self) -> None:
        super().__init__(MACHINES / SWITCH)
        self.environ = {
            **self.environ,
            "SGLANG_HOST_IP": PLANTED["ip"],
            "SGLANG_NAME": PLANTED["program"],
            "NCCL_HOSTID": f"{PLANTED['host']}.{PLANTED['domain']}",
            "SGLANG_API_KEY": PLANTED["key"],
            "LD_LIBRARY_PATH": f"/home/{PLANTED['user']}/lib:/mnt/{PLANTED['model']}/lib",
            "TORCH_EXTENSIONS_DIR": f"/tmp/torch_{PLANTED['user']}",
            "FLASHINFER_EXTRA_CUDAFLAGS": f"-I/data/{PLANTED['model']}/include",
        }

    def run(self, name: str) -> Output:
        output = super().run(name)
        text = output.text
        if name == "nvidia-smi-q":
            text = text.replace("<serial>[...]</serial>", f"<serial>{PLANTED['serial']}</serial>")
            text = text.replace("<uuid>[...]</uuid>", f"<uuid>GPU-{PLANTED['uuid']}</uuid>")
            words = (
                f"/home/{PLANTED['user']}/bin/python3 serve --model /mnt/{PLANTED['model']} --api-key {PLANTED['key']}"
            )
            text = text.replace("<process_name>sglang::scheduler_TP2<", f"<process_name>{words}<")
            assert PLANTED["serial"] in text and PLANTED["uuid"] in text and PLANTED["key"] in text
            text = text.replace("<processes>", f"<processes><!-- {PLANTED['hugging face']} -->", 1)
        if name == "lspci":
            text += f"\n\tCapabilities: [148 v1] Device Serial Number {PLANTED['pci serial']}\n"
        return Output(output.state, text, output.code)

    def text(self, path: str) -> str:
        text = super().text(path)
        if path == "/proc/driver/nvidia/version":
            text = text.replace("[host]", PLANTED["other host"]).replace("dvs-builder", "root")
            assert PLANTED["other host"] in text
        if path == "/proc/41233/status":
            assert text
            text = f"Name:\t{PLANTED['program'][:15]}\n{text}Uid:\t4711\n"
        if path == "/run/.containerenv":
            text = f'engine="podman-5.2"\nname="{PLANTED["program"]}"\nimage="{PLANTED["group"]}"\n'
        if path == "/proc/self/cgroup":
            text = f"0::/system.slice/{PLANTED['group']}\n"
        if path.endswith(f"{PLANTED['group']}/memory.max"):
            text = "1073741824\n"
        if path == "/proc/cmdline":
            text = f"root=UUID={PLANTED['uuid']} ip={PLANTED['ip']}::{PLANTED['mac']} luks={PLANTED['key']} {text}"
        return text

    def python(self) -> dict[str, Any]:
        return super().python() | {"sglang_tree": f"/home/{PLANTED['user']}/v/lib/python3.12/site-packages/sglang"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    who = redact.Identity(hosts=(PLANTED["host"],), users=(PLANTED["user"],))
    monkeypatch.setattr(redact.Identity, "of_this_machine", classmethod(lambda cls: who))


@pytest.mark.usefixtures("known")
def test_nothing_private_is_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.txt"
    assert command.run(arguments("--report", str(file)), Planted()) == 0
    text = file.read_text()
    left = {kind for kind, secret in PLANTED.items() if secret.lower() in text.lower()}
    assert not left
    for needed in (
        "ACS: it redirects on ports of switches", "580.95.05", "0000:82:00.0",
        "=== /proc/driver/nvidia/version", "ReqRedir+", "RTX PRO 6000",
        "[home]/site-packages/sglang", "sglang-kernel", "amd_iommu=off",
    ):  # fmt: skip
        assert needed in text
    assert "look it over" in capsys.readouterr().err


@pytest.mark.usefixtures("known")
def test_a_recording_is_anonymous_and_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "recorded"
    command.run(arguments("--record", str(folder), "--fix-hints"), Planted())
    live = capsys.readouterr().out
    for file in folder.iterdir():
        text = file.read_text().lower()
        assert not {kind for kind, secret in PLANTED.items() if secret.lower() in text}, file.name
    command.run(arguments("--machine", str(folder), "--fix-hints"))
    again = capsys.readouterr().out
    assert [line.split(":")[0] for line in again.splitlines()] == [line.split(":")[0] for line in live.splitlines()]
    assert again == redact.redact(live, redact.Identity.of_this_machine())


@pytest.mark.parametrize("option", ["--report", "--record"])
def test_nothing_is_overwritten_unless_forced(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    if option == "--report":
        there.write_text("mine")
    else:
        there.mkdir()
        (there / "mine").touch()
    words = ["doctor", "--machine", str(MACHINES / HEALTHY), option, str(there)]
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and "is there already" in err and "--force" in err
    if option == "--report":
        assert there.read_text() == "mine"
    assert cli.main([*words, "--force"]) == 0
    if option == "--report":
        assert there.read_text().startswith("sglang-sm120 ")
    else:
        assert (there / "mine").exists() and (there / "machine.json").exists()


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert cli.main(["doctor", "--machine", str(MACHINES / HEALTHY), "--report", str(tmp_path / "link")]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_folder_may_be_recorded_into(tmp_path: Path) -> None:
    assert cli.main(["doctor", "--machine", str(MACHINES / HEALTHY), "--record", str(tmp_path)]) == 0
    assert (tmp_path / "nvidia-smi-q.txt").exists()
