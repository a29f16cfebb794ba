"""The profile that `sglang-sm120 tune` writes: what every runner took on one machine, and the tables made from it."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import msgspec
import torch

from sglang_sm120 import __version__
from sglang_sm120.errors import ConfigError
from sglang_sm120.kernels.moe.layer import Nvfp4MoeWeights
from sglang_sm120.runners.base import Choice, LayerSpec
from sglang_sm120.runners.table import Row, RunnerTable

FORMAT = "sglang-sm120 MoE profile 1"
_AGAIN = "run `sglang-sm120 tune` on this machine again, or drop --sm120-moe-profile"


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a time depends on beside the layer. A version is None where the package is not installed."""

    gpu: str
    capability: str  # "12.0"; "" on a CPU
    multiprocessors: int
    driver: str
    torch: str
    triton: str | None
    flashinfer: str | None
    sglang_sm120: str

    def mismatch(self, other: Machine) -> str | None:
        """What makes times of `self` mean nothing on `other`: "gpu NVIDIA H200, here ...", or None.

        Another driver changes times by little, so it does not count.
        """
        for name in ("gpu", "capability", "multiprocessors", "torch", "triton", "flashinfer", "sglang_sm120"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {mine or 'none'}, here {theirs or 'none'}"
        return None


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's part of a layer."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    activation: str
    hidden_dtype: str  # "bfloat16"


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One runner at one batch size: its times, or why there are none. Times are of one call, in microseconds.

    failed: it was wrong or broke, rather than not covering the layer.
    """

    runner: str
    numerics: str
    samples_us: list[float] = []
    relative_error: float | None = None
    reason: str = ""
    failed: bool = False

    @property
    def choice(self) -> Choice:
        return Choice(self.runner, self.numerics)

    @property
    def median_us(self) -> float | None:
        return statistics.median(self.samples_us) if self.samples_us else None


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tokens: int
    candidates: list[Candidate]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    shape: Shape
    points: list[Point]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: str
    created: str  # ISO 8601, UTC
    command: str
    machine: Machine
    layers: list[Layer]

    def layer(self, shape: Shape) -> Layer | None:
        """The measurements of exactly this shape."""
        return next((layer for layer in self.layers if layer.shape == shape), None)


def shape_of(weights: Nvfp4MoeWeights, spec: LayerSpec) -> Shape:
    """What a profile knows a layer by. A swiglu limit and expert parallelism leave it the same."""
    return Shape(
        num_experts=weights.num_experts,
        top_k=spec.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        is_gated=weights.is_gated,
        activation=spec.activation.name,
        hidden_dtype=str(spec.hidden_dtype).removeprefix("torch."),
    )


def current_machine() -> Machine:
    """This process's GPU and versions; gpu "cpu" where there is none."""
    gpu, capability, multiprocessors, driver = "cpu", "", 0, ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
        multiprocessors, driver = properties.multi_processor_count, driver_version()
    return Machine(
        gpu=gpu,
        capability=capability,
        multiprocessors=multiprocessors,
        driver=driver,
        torch=str(torch.__version__),
        triton=_installed("triton"),
        flashinfer=_installed("flashinfer_python"),
        sglang_sm120=__version__,
    )


@functools.cache
def driver_version() -> str:
    """Of NVIDIA's driver, as nvidia-smi says it; else why it is not known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "not known (no nvidia-smi)"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0].strip() or f"not known (nvidia-smi exited with {done.returncode})"


def default_path(gpu: str | None = None) -> Path:
    """Where the profile of a GPU of this name (None: this machine's) lies if nobody says otherwise."""
    gpu = current_machine().gpu if gpu is None else gpu
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unnamed"
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = given if given.is_absolute() else Path.home() / ".cache"  # a relative one is to be ignored
    return cache / "sglang-sm120" / f"moe-profile-{slug}.json"


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def read(path: Path | str) -> Profile:
    """Read and check a profile.

    Raises: ConfigError: it cannot be read, is not a profile, or holds what no measurement gives.
    """
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror or error}", "a file that can be read", _AGAIN) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile {path}: {error}", "what `sglang-sm120 tune` writes", _AGAIN) from error
    if profile.format != FORMAT:
        raise ConfigError(f"profile {path} is of format {profile.format!r}", repr(FORMAT), _AGAIN)
    for layer in profile.layers:
        tokens = [point.tokens for point in layer.points]
        times = [us for point in layer.points for c in point.candidates for us in c.samples_us]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1 or not all(0 < us < math.inf for us in times):
            raise ConfigError(
                f"profile {path}: token counts {tokens} and times of {len(times)} samples",
                "ascending token counts from 1 on, and times above 0",
                _AGAIN,
            )
    return profile


def write(profile: msgspec.Struct, path: Path | str) -> None:
    """Write a profile of any kind, whole or not at all.

    Raises: ConfigError: the file cannot be written.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"profile {path}: {error.strerror or error}", "a path that can be written", "name another"
        ) from error


def table(layer: Layer, numerics: str, source: str) -> RunnerTable | None:
    """The ranking by median time at every measured count, or None where nothing was timed in these numerics.

    Between two counts the border is their geometric mean. numerics: "auto" takes both.
    """
    rows: list[Row] = []
    counts = [point.tokens for point in layer.points]
    for index, point in enumerate(layer.points):
        timed = [
            (candidate.median_us, Choice(candidate.runner, candidate.numerics))
            for candidate in point.candidates
            if candidate.median_us is not None and numerics in ("auto", candidate.numerics)
        ]
        if not timed:
            continue
        border = math.isqrt(counts[index] * counts[index + 1]) if index + 1 < len(counts) else None
        rows.append(Row(border, tuple(choice for _, choice in sorted(timed))))
    if not rows:
        return None
    rows[-1] = Row(None, rows[-1].ranking)
    return RunnerTable(tuple(rows), source)
