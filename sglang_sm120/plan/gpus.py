"""GPUs that a plan can be made for: how much memory each has, from a small table, from nvidia-smi, or as a size."""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_sm120.errors import ConfigError

MIB = 1024**2
GIB = 1024**3

HELD_BACK_BYTES = 640 * MIB
"""What CUDA does not hand out of the memory that nvidia-smi shows. A guess, for GPUs whose CUDA total is not in the
table: it is 638 MiB on the RTX PRO 6000, 531 on the RTX PRO 5000, 484 on the RTX 5090 and 615 on the H200."""

LARGEST_GPU_GIB = 1024
"""Above this a size is a slip: no GPU has a TiB."""

DETECT = "detect"

_SIZE = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>GiB|GB|G|MiB)$", re.IGNORECASE)
_UNITS = {"gib": GIB, "gb": 10**9, "g": GIB, "mib": MIB}
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    name: as `--gpu` takes it. title: as people know it. shown_bytes: what nvidia-smi shows as total; SGLang computes
    its defaults from it. cuda_bytes: what CUDA has as total, which is what can be allocated.
    l2_bytes, persisting_l2_bytes: None where not known for sure. p2p: whether the stock driver lets GPUs of this kind
    read each other's memory; None where not known for sure. is_sm120: compute capability 12.x, for which this package
    is. source: where the figures are from. note: what a person should know of how it was chosen.
    """

    name: str
    title: str
    shown_bytes: int
    cuda_bytes: int
    l2_bytes: int | None = None
    persisting_l2_bytes: int | None = None
    p2p: bool | None = None
    is_sm120: bool = True
    source: str = ""
    note: str = ""


_PRO_6000 = "nvidia-smi and torch's out-of-memory messages in public reports; L2 as CUDA reports it"

GPUS: tuple[Gpu, ...] = (
    Gpu(
        "rtx-pro-6000", "RTX PRO 6000 Blackwell Workstation Edition", 97_887 * MIB, int(94.97 * GIB), 128 * MIB,
        84 * MIB, True, source=_PRO_6000,
    ),
    Gpu(
        "rtx-pro-6000-max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97_887 * MIB, int(94.97 * GIB),
        128 * MIB, 84 * MIB, True, source=_PRO_6000,
    ),
    Gpu(
        "rtx-pro-6000-server", "RTX PRO 6000 Blackwell Server Edition", 97_887 * MIB, int(94.97 * GIB),
        128 * MIB, 84 * MIB, True, source=_PRO_6000,
    ),
    Gpu(
        "rtx-pro-5000-72gb", "RTX PRO 5000 72GB Blackwell", 73_415 * MIB, 73_415 * MIB - HELD_BACK_BYTES,
        source="nvidia-smi in public reports; the CUDA total is a guess, 640 MiB less",
    ),
    Gpu(
        "rtx-pro-5000", "RTX PRO 5000 Blackwell", 48_935 * MIB, int(47.27 * GIB), 96 * MIB,
        source="nvidia-smi and CUDA device properties in public reports",
    ),
    Gpu(
        "rtx-5090", "GeForce RTX 5090", 32_607 * MIB, int(31.37 * GIB), 96 * MIB, p2p=False,
        source="nvidia-smi and torch's out-of-memory messages in public reports; P2P needs a patched driver",
    ),
    Gpu(
        "h200", "H200", 143_771 * MIB, int(139.80 * GIB), 60 * MIB, int(37.5 * MIB), True, is_sm120=False,
        source="nvidia-smi, torch's out-of-memory messages and CUDA device properties",
    ),
)  # fmt: skip

_BY_NAME = {gpu.name: gpu for gpu in GPUS}


@dataclass(frozen=True)
class Detected:
    """The GPUs of this machine. gpu: the smallest kind, which counts. count: how many there are."""

    gpu: Gpu
    count: int


def find(text: str) -> Gpu:
    """The GPU that `--gpu` names: a name of the table, a size such as 96GiB, or several with commas.

    Args:
        text: anything but "detect", which `detect` serves.

    Returns:
        The GPU; of several, the smallest, with a note that says so.

    Raises:
        ConfigError: an unknown name, or a size that no GPU has.
    """
    kinds = [_find_one(part.strip()) for part in text.split(",")]
    return _smallest(kinds)


def detect(ask: Callable[[Sequence[str]], str] | None = None) -> Detected:
    """The GPUs that nvidia-smi lists.

    Args:
        ask: runs a command and returns what it prints; for tests.

    Raises:
        ConfigError: no nvidia-smi, no GPU, or an answer that cannot be read.
    """
    answer = (ask or _run)(_QUERY)
    kinds = [_from_line(line) for line in answer.splitlines() if line.strip()]
    if not kinds:
        raise ConfigError("nvidia-smi lists no GPU", "an NVIDIA GPU", "name one instead, such as --gpu rtx-pro-6000")
    return Detected(_smallest(kinds), len(kinds))


def _find_one(text: str) -> Gpu:
    if text.lower() == DETECT:
        raise ConfigError(
            f"--gpu {DETECT} beside others", f"{DETECT} alone, which finds all kinds", "leave the others out"
        )
    gpu = _BY_NAME.get(text.lower().replace("_", "-").replace(" ", "-"))
    if gpu is not None:
        return gpu
    size = _SIZE.match(text)
    if size is None:
        names = ", ".join((*_BY_NAME, DETECT))
        near = difflib.get_close_matches(text.lower(), list(_BY_NAME), n=1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else "name one of these, or a size: --gpu 96GiB"
        raise ConfigError(f"--gpu {text!r}: unknown GPU", f"one of {names}, or a size such as 96GiB", fix)
    # Capped, so that a number with hundreds of digits is refused as any other that is too large.
    size_bytes = int(min(float(size["number"]), 1e9) * _UNITS[size["unit"].lower()])
    if not GIB <= size_bytes <= LARGEST_GPU_GIB * GIB:
        raise ConfigError(
            f"--gpu {text}: no GPU has that much memory" if size_bytes > GIB else f"--gpu {text}: less than 1 GiB",
            f"1 to {LARGEST_GPU_GIB} GiB of one GPU",
            "give the memory of one GPU, and their number with --gpus",
        )
    # A size is taken at its word: it is what can be allocated.
    return Gpu(text, f"a GPU with {text}", size_bytes, size_bytes, source="--gpu")


def _smallest(kinds: Sequence[Gpu]) -> Gpu:
    smallest = min(kinds, key=lambda gpu: gpu.cuda_bytes)
    titles = list(dict.fromkeys(gpu.title for gpu in kinds))
    if len(titles) == 1:
        return smallest
    p2p = None if any(gpu.p2p is None for gpu in kinds) else all(gpu.p2p for gpu in kinds)
    note = f"mixed GPUs ({', '.join(titles)}): every one counts as the smallest, {smallest.title}"
    return replace(smallest, note=note, p2p=p2p, is_sm120=all(gpu.is_sm120 for gpu in kinds))


def _run(command: Sequence[str]) -> str:
    fix = "name the GPU instead, such as --gpu rtx-pro-6000; `sglang-sm120 plan --list` has all names"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise ConfigError("--gpu detect: there is no nvidia-smi here", "the NVIDIA driver", fix) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--gpu detect: nvidia-smi cannot be run ({error})", "the NVIDIA driver", fix) from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        found = f"--gpu detect: nvidia-smi ended with {done.returncode}" + (f" ({said[0]})" if said else "")
        raise ConfigError(found, "a driver that answers", fix)
    return done.stdout


def _from_line(line: str) -> Gpu:
    parts = [part.strip() for part in line.rsplit(",", 2)]
    if len(parts) != 3 or not parts[1].isdecimal() or int(parts[1]) == 0:
        raise ConfigError(
            f"nvidia-smi says {line.strip()!r}",
            "a GPU's name, its memory in MiB and its compute capability",
            "name the GPU or its memory instead, such as --gpu 96GiB",
        )
    name, shown_bytes = parts[0], int(parts[1]) * MIB
    title = name.removeprefix("NVIDIA ")
    capability = parts[2].split(".")[0]
    known = next((gpu for gpu in GPUS if gpu.title == title and gpu.shown_bytes == shown_bytes), None)
    if known is not None:
        return known
    return Gpu(
        name, title, shown_bytes, shown_bytes - HELD_BACK_BYTES, is_sm120=capability == "12",
        source="nvidia-smi; the CUDA total is a guess, 640 MiB less",
    )  # fmt: skip
