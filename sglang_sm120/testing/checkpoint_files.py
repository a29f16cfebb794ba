"""The files of a Hugging Face checkpoint, and where its NVFP4 tensors are: shared by the writers and readers here."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_sm120.errors import ConfigError, UnsupportedError

# role -> suffix of the tensor's name, for each layout
SUFFIXES = {
    "modelopt": {
        "packed": ".weight",
        "block_scale": ".weight_scale",
        "weight_scale_2": ".weight_scale_2",
        "input_scale": ".input_scale",
    },
    "compressed-tensors": {
        "packed": ".weight_packed",
        "block_scale": ".weight_scale",
        "weight_scale_2": ".weight_global_scale",
        "input_scale": ".input_global_scale",
    },
}
FORMATS = tuple(SUFFIXES)
EXPERT_LINEAR = re.compile(
    r"(?P<experts>.+\.mlp\.experts)\.(?P<index>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)"
)
INPUT_SCALES_FILE = "nvfp4_input_scales.json"
"""In a dequantised checkpoint: {experts module: {"w13": [scale of each expert], "w2": [...]}}, as serving uses them."""

# (tensor's name, tensor) -> the tensors that take its place
Convert = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `out` and rename it to `out` at the end; on an error nothing is left.

    Raises:
        ConfigError: `out` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory", "a new directory", "remove it or name another")
    out.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield directory
        directory.chmod(0o755)  # mkdtemp makes it private
        directory.replace(out)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def update_json(path: Path, **entries: Any) -> None:
    """Set top-level entries of a JSON file; one given as None is removed. A missing file counts as empty."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data.update(entries)
    kept = {key: value for key, value in data.items() if value is not None or key not in entries}
    path.write_text(json.dumps(kept, indent=2) + "\n")


def routed_expert_modules(checkpoint: Path) -> list[str]:
    """Return the module names of all routed experts' linears, plain or NVFP4, in order of layer, expert, projection."""
    names = {name.rsplit(".", 1)[0] for name in tensor_files(Path(checkpoint))}
    matches = [match for match in map(EXPERT_LINEAR.fullmatch, names) if match]
    order = ("gate_proj", "up_proj", "down_proj").index

    def key(match: re.Match[str]) -> tuple[list[tuple[int, str]], int, int]:
        parts = [(int(part), "") if part.isdigit() else (-1, part) for part in match["experts"].split(".")]
        return parts, int(match["index"]), order(match["projection"])

    return [match[0] for match in sorted(matches, key=key)]


def stored_scale(scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """The tensor that layout `fmt` stores for a multiplier s2."""
    return scale.clone() if fmt == "modelopt" else (1 / scale).reshape(1)


def value_of_stored(stored: torch.Tensor, fmt: str) -> torch.Tensor:
    """The multiplier s2, fp32 scalar, that a reader of layout `fmt` gets from the stored tensor."""
    return stored.reshape(()) if fmt == "modelopt" else (1 / stored).reshape(())


def need_format(fmt: str) -> None:
    """Raise UnsupportedError unless `fmt` is one of `FORMATS`."""
    if fmt not in FORMATS:
        raise UnsupportedError(f"checkpoint format {fmt!r}", f"one of {', '.join(FORMATS)}", "name one of them")


def read_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's config.json, or raise ConfigError."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} has no config.json", "a Hugging Face checkpoint", "check the path")
    return json.loads(path.read_text())


def read_format(directory: Path) -> str:
    """Return which of `FORMATS` a checkpoint declares, or raise ConfigError."""
    method = (read_config(directory).get("quantization_config") or {}).get("quant_method")
    if method not in FORMATS:
        raise ConfigError(f"{directory} has quant_method {method!r}", f"one of {', '.join(FORMATS)}", "check the path")
    return method


def tensor_files(directory: Path) -> dict[str, Path]:
    """{tensor name: file that holds it}, for all safetensors files of a directory."""
    files = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as reader:
            files.update(dict.fromkeys(reader.keys(), path))
    if not files:
        raise ConfigError(f"{directory} has no safetensors files", "a Hugging Face checkpoint", "check the path")
    return files


def read_tensor(files: Mapping[str, Path], name: str) -> torch.Tensor:
    """Return one tensor, or raise ConfigError."""
    if name not in files:
        raise ConfigError(
            f"the checkpoint has no tensor {name}", "all four NVFP4 tensors of a linear", "write it again"
        )
    with safe_open(files[name], framework="pt") as reader:
        return reader.get_tensor(name)


def read_scale(files: Mapping[str, Path], name: str, fmt: str) -> torch.Tensor:
    """Return the multiplier s2 that a tensor holds, fp32 scalar; raise ConfigError unless finite and positive."""
    stored = read_tensor(files, name)
    if stored.numel() != 1 or not torch.isfinite(stored).all() or not (stored > 0).all():
        raise ConfigError(f"{name} is {stored.tolist()}", "one finite value above 0", "write the checkpoint again")
    return value_of_stored(stored.float(), fmt)


def convert_files(files: Mapping[str, Path], directory: Path, convert: Convert) -> None:
    """Pass every tensor through `convert` and write one output file for each input file, with an index if several."""
    weight_map: dict[str, str] = {}
    total_size = 0
    paths = sorted(set(files.values()))
    for path in paths:
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a dict
                tensors.update({new: tensor.contiguous() for new, tensor in convert(name, reader.get_tensor(name))})
        save_file(tensors, directory / path.name, metadata={"format": "pt"})
        (directory / path.name).chmod(0o644)  # safetensors makes it private
        weight_map.update(dict.fromkeys(tensors, path.name))
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if len(paths) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        update_json(directory / "model.safetensors.index.json", **index)


def copy_side_files(src: Path, directory: Path, *, quantised: bool = False) -> None:
    """Copy all files but the tensors; also what describes the quantisation of `src` if the copy is `quantised`."""
    own = {"model.safetensors.index.json", *(() if quantised else ("hf_quant_config.json", INPUT_SCALES_FILE))}
    for path in sorted(src.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in own:
            shutil.copy2(path, directory / path.name)
