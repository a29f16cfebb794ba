"""Doctor where little works: torch, SGLang or tools that are missing, broken, or crash. Real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def doctor(*words: str, before: str = "", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own; path: a folder that comes first on Python's path, also of its children."""
    code = f"import sys\n{before}\nfrom sglang_sm120.cli import main\nraise SystemExit(main(['doctor', *sys.argv[1:]]))"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "CUDA_"))}
    environ["PYTHONPATH"] = os.pathsep.join([*([str(path)] if path else []), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100, env=environ, cwd="/"
    )


BLOCK = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is broken here")
sys.meta_path.insert(0, Blocker())
"""


def shim(folder: Path, code: str) -> Path:
    """A package torch that does this when it is imported."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(code)
    return folder


def broken(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["what"] == "torch"]
    assert found["level"] == "fail" and found["fix"]
    return found


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("raise SystemExit('gone')", "gone"),
        ("import os; os.abort()", "does not start"),
        ("version = 1", "AttributeError"),
    ],
)
def test_a_torch_that_is_broken(code: str, told: str, tmp_path: Path) -> None:
    """Doctor itself imports neither torch, nor sglang, nor what brings them."""
    before = BLOCK.format(names={"torch", "sglang", "triton", "flashinfer", "transformers"})
    found = broken(doctor("--json", path=shim(tmp_path, code), before=before))
    assert told in found["found"]


def test_without_sglang_torch_and_rich(tmp_path: Path) -> None:
    """As Python is where nothing but this package was installed."""
    code = "raise ModuleNotFoundError(\"No module named 'torch'\")"
    before = BLOCK.format(names={"torch", "sglang", "rich", "numpy", "psutil", "msgspec"})
    before += "from importlib import metadata\nmetadata.distributions = lambda **k: iter(())\n"
    done = doctor(path=shim(tmp_path, code), before=before)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "fail  SGLang: not installed" in done.stdout
    assert "fail  torch: not installed" in done.stdout


def test_tools_that_crash_or_say_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("nvidia-smi", "echo Driver/library version mismatch; exit 18"), ("lspci", "kill -SEGV $$")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = doctor("--json")
    assert done.returncode == 1, done.stderr
    (driver,) = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "gpu.driver"]
    assert driver["level"] == "fail" and "version mismatch" in driver["found"]
    assert any("updated under a running kernel module" in step for step in driver["fix"])


HOOK_THAT_RAISES = """
class Raises:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise {error}("a broken import hook")
sys.meta_path.insert(0, Raises())
"""


@pytest.mark.parametrize("error", ["RuntimeError", "AttributeError", "KeyError", "ZeroDivisionError"])
def test_an_import_hook_that_raises_anything(error: str, tmp_path: Path) -> None:
    before = HOOK_THAT_RAISES.format(names={"mscclpp", "nvidia", "sglang"}, error=error)
    done = doctor("--json", path=shim(tmp_path, "raise ImportError('no')"), before=before)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    found = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "installation.readable"]
    assert [each["level"] for each in found] == ["warn"]
    assert f"mscclpp: {error}: " in found[0]["found"] and "pip check" in found[0]["fix"][0]


def test_a_package_that_prints_or_fails_when_it_is_imported_is_not_imported(tmp_path: Path) -> None:
    """Python's own search for nvidia.cu13 would import nvidia."""
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").write_text("print('noise')\nraise RuntimeError('damaged')\n")
    done = doctor("--json", path=shim(tmp_path, "raise ImportError('no')"))
    assert "Traceback" not in done.stderr, done.stderr
    assert json.loads(done.stdout)["findings"]


@pytest.mark.parametrize("name", ["distributions", "entry_points", "requires"])
def test_metadata_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    before = (
        f"from importlib import metadata\ndef fails(*a, **k): raise TypeError('damaged')\nmetadata.{name} = fails\n"
    )
    done = doctor("--json", path=shim(tmp_path, "raise ImportError('no')"), before=before)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {each["level"] for each in findings if each["check"] == "installation.readable"} == {"warn"}
