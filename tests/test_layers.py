"""Who may import whom, style and types: the tools pass on this repository and fail on a copy with a planted fault."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS, NEVER_SGLANG, ONLY_INTEGRATION, STDLIB, THROUGH_API = (contract["name"] for contract in CONTRACTS)
NVFP4_API = "kernels/quantization/nvfp4/api.py"


def run(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], cwd=cwd, capture_output=True, text=True, timeout=300)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return run(root, str(BIN / "lint-imports"), "--no-cache", "--no-logo")


def ruff(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run(root, str(BIN / "ruff"), *args, "--no-cache", ".")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its configuration, elsewhere."""
    shutil.copytree(
        ROOT / "sglang_sm120", tmp_path / "sglang_sm120", ignore=shutil.ignore_patterns("models", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, file: str, line: str) -> None:
    """Add an import at the end of a file of the copy."""
    path = root / "sglang_sm120" / file
    path.write_text(path.read_text() + "\n" + line + "\n")


def test_import_contracts_hold_and_every_file_was_read() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    (analyzed,) = re.findall(r"Analyzed (\d+) files", done.stdout)
    assert int(analyzed) >= len(list((ROOT / "sglang_sm120").rglob("*.py"))) >= 30
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (NVFP4_API, "import sglang", {NEVER_SGLANG}),
        (NVFP4_API, "def f():\n    from sglang.srt.layers import moe", {NEVER_SGLANG}),
        (NVFP4_API, "from sglang_sm120.plan import checkpoint", {LAYERS}),
        (NVFP4_API, "from sglang_sm120.testing import checkpoints", {LAYERS}),
        ("testing/server.py", "import sglang", {ONLY_INTEGRATION}),
        ("plan/checkpoint.py", "from sglang_sm120.integration import apply", {LAYERS, NEVER_SGLANG, STDLIB}),
        ("plan/checkpoint.py", "import torch", {STDLIB}),
        ("plan/checkpoint.py", "from sglang_sm120.kernels.quantization.nvfp4 import api", {STDLIB}),
        ("errors.py", "from sglang_sm120 import options", {LAYERS}),
        ("integration/moe.py", "from sglang_sm120.kernels.moe.fused_moe import reference", {THROUGH_API}),
        ("new_module.py", "", {LAYERS}),
    ],
)
def test_a_planted_import_breaks_its_contract(file: str, line: str, broken: set[str], copy: Path) -> None:
    (copy / "sglang_sm120" / file).touch()
    plant(copy, file, line)
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    results = dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
    assert len(results) == len(CONTRACTS)
    assert {name for name, result in results.items() if result == "BROKEN"} == broken, done.stdout


def test_ruff_passes() -> None:
    for arguments in (["check"], ["format", "--check"]):
        done = ruff(ROOT, *arguments)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "rule"),
    [
        (NVFP4_API, "import sglang", "TID251"),
        ("testing/server.py", "def f():\n    from sglang.srt import utils", "TID251"),
        (NVFP4_API, "def f():\n    import triton", "PLC0415"),
        (NVFP4_API, "from . import reference", "TID252"),
        (NVFP4_API, "print(GROUP_SIZE)", "T201"),
    ],
)
def test_ruff_notices_a_planted_fault(file: str, line: str, rule: str, copy: Path) -> None:
    finding = re.compile(rf"{file}:\d+:\d+: {rule} ")
    assert not finding.search(ruff(copy, "check", "--output-format", "concise").stdout)
    plant(copy, file, line)
    done = ruff(copy, "check", "--output-format", "concise")
    assert done.returncode == 1
    assert finding.search(done.stdout), done.stdout


def mypy(root: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return run(root, sys.executable, "-m", "mypy", "--cache-dir", str(cache))


def test_mypy_passes(tmp_path: Path) -> None:
    done = mypy(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout
    (checked,) = re.findall(r"no issues found in (\d+) source files", done.stdout)
    files = len(list((ROOT / "sglang_sm120").rglob("*.py")))
    assert int(checked) >= files > 35, "mypy looked at every file; it counts folders without __init__.py too"


def test_mypy_notices_a_planted_fault(copy: Path) -> None:
    plant(copy, "options.py", "_wrong: int = ENV_PREFIX")
    done = mypy(copy, copy / "cache")
    assert done.returncode == 1
    assert re.search(r"options\.py:\d+: error: Incompatible types", done.stdout), done.stdout


def test_the_package_itself_imports_nothing() -> None:
    """Bare interpreter: no site-packages, no environment."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); old = set(sys.modules); import sglang_sm120; "
    code += "print(sorted(set(sys.modules) - old), sglang_sm120.__version__)"
    done = run(ROOT, sys.executable, "-I", "-S", "-c", code, str(ROOT))
    assert re.fullmatch(r"\['sglang_sm120'\] \d+\.\d+\.\d+\S*\n", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "options", "errors", "device", "cli", "plugin", "plan.checkpoint", "integration.hooks", "integration.check",
        "doctor.checks", "testing.cpu_platform", "kernels.moe.fused_moe", "kernels.quantization.nvfp4",
        "bench.options",
    ],
)  # fmt: skip
def test_light_modules_load_without_anything_installed(module: str) -> None:
    """Bare interpreter again, so that importing torch, numpy or sglang anywhere would fail."""
    code = "import sys, importlib; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]); "
    code += "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'sglang', 'transformers'})"
    done = run(ROOT, sys.executable, "-I", "-S", "-c", code, str(ROOT), f"sglang_sm120.{module}")
    assert done.stdout == "set()\n", done.stderr
