"""Make .venv with SGLang and this package: `make demo` and `make test` call it. Standard library only.

With an NVIDIA GPU it is the ordinary `pip install`. Without one it installs the lean list of requirements-cpu.txt,
which serves text on the CPU and spares about 8 GB of CUDA packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = ROOT / ".venv"
PYTHON = ENV / "bin" / "python"
READY = ENV / ".ready"
CPU_TORCH_HINT = """\
setup: no CPU build of {torch} on the package index that pip uses here, so the CUDA build is installed instead: it
setup: works, and is some gigabytes larger. To spare them, point PIP_EXTRA_INDEX_URL at the index of CPU wheels that
setup: PyTorch's "Start locally" page shows for Linux, Pip, CPU, delete .venv and run this again."""


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(
            f"setup: Python {sys.version.split()[0]} found; needed: 3.11 or newer; fix: make PYTHON=python3.11 ..."
        )
    if READY.exists() and READY.read_text() == _inputs():
        return
    if not PYTHON.exists():
        _say(f"creating {ENV}")
        venv.create(ENV, with_pip=True)
    _pip("--upgrade", "pip", "setuptools>=77", "wheel")
    if has_nvidia_gpu():
        _say("NVIDIA GPU found: installing SGLang with all that it requires (about 11 GB, 10 minutes)")
        _pip("-e", ".[test]")
    else:
        _say("no NVIDIA GPU: installing the lean list for the CPU (about 2.5 GB, 2 to 4 minutes)")
        _install_lean()
    READY.write_text(_inputs())


def has_nvidia_gpu() -> bool:
    """Whether the driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and b"GPU 0" in subprocess.run([tool, "-L"], capture_output=True, check=False).stdout


def _install_lean() -> None:
    pins = [line for line in _lines("requirements-cpu.txt") if not line.startswith("torch==")]
    (torch,) = [line for line in _lines("requirements-cpu.txt") if line.startswith("torch==")]
    if _pip("--no-deps", torch, check=False):
        public = torch.split("+")[0]
        print(CPU_TORCH_HINT.format(torch=public), flush=True)
        _pip(public)
    _pip("--no-deps", *pins)
    import tomllib  # not at the top: an older Python lacks it and must get as far as the message in main

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _pip(*project["optional-dependencies"]["test"])
    _pip("--no-deps", "--no-build-isolation", "-e", ".")
    _repair_torchvision()


def _repair_torchvision() -> None:
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([PYTHON, "-c", query], capture_output=True, text=True, check=True).stdout.strip())
    shutil.copy(ROOT / "tools" / "torchvision_without_ops.py", site)
    (site / "torchvision_without_ops.pth").write_text("import torchvision_without_ops\n")
    subprocess.run([PYTHON, "-W", "ignore", "-c", "import torchvision"], check=True)


def _pip(*arguments: str, check: bool = True) -> int:
    command = [PYTHON, "-m", "pip", "install", "--progress-bar", "on", "-q", *arguments]
    shown = " ".join(arguments[:4]) + (f" and {len(arguments) - 4} more" if len(arguments) > 4 else "")
    _say(f"pip install {shown}")
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code and check:
        sys.exit(f"setup: pip failed (its message is above); command: {' '.join(map(str, command[:8]))} ...")
    return code


def _lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def _inputs() -> str:
    """What decides the environment's content: a change makes the next call install again."""
    names = ("pyproject.toml", "requirements-cpu.txt", "tools/setup_env.py")
    return "".join((ROOT / name).read_text() for name in names)


def _say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
