"""What `train_demo_model.py` writes beside the checkpoint: figures, model card, loss curve."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_sm120.errors import ConfigError

MAX_BYTES = 8_000_000  # of the whole output directory: the model ships inside the package


def environment(device: str) -> dict[str, Any]:
    """Versions, device and command line of this run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        # Folders are the runner's own business; everything else of the command is what reproduces the model.
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *map(_without_folder, sys.argv[1:])]),
    }


def _without_folder(word: str) -> str:
    return "DIR" if "/" in word else word


def text_version(text_root: Path) -> str:
    """Version of the Python whose library the text is: this interpreter's, else what the folder's name says."""
    own = Path(sysconfig.get_path("stdlib")).resolve() == Path(text_root).resolve()
    return platform.python_version() if own else Path(text_root).name.removeprefix("python")


def describe(documents: list[tuple[str, str]]) -> dict[str, Any]:
    """Size and hash of (path, text) documents."""
    digest, size = hashlib.sha256(), 0
    for path, text in documents:
        digest.update(f"{path}\0{text}\0".encode())
        size += len(text.encode())
    return {"files": len(documents), "bytes": size, "sha256": digest.hexdigest()}


def describe_held_out(text: str, training: list[tuple[str, str]]) -> dict[str, Any]:
    """Size and hash of the held-out text, and how many of its lines of 40 characters or more the training text has."""
    seen = {line.strip() for _, source in training for line in source.splitlines()}
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 40]
    return {
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "long_lines_also_in_training": round(sum(line in seen for line in lines) / len(lines), 4),
    }


def write_report(out: Path, metrics: dict[str, Any]) -> int:
    """Write metrics.json, README.md and loss.png beside the checkpoint; return the directory's size, <= `MAX_BYTES`."""
    try:
        plot_curve(out / "loss.png", metrics["curve"])
    except ImportError:
        print("no matplotlib here: no loss.png")
    metrics["files"] = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (out / "README.md").write_text(model_card(metrics))
    total = sum(path.stat().st_size for path in out.iterdir())
    if total > MAX_BYTES:
        raise ConfigError(f"{out} takes {total} bytes", f"at most {MAX_BYTES}", "use a smaller vocabulary or model")
    return total


def plot_curve(path: Path, curve: list[dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), dpi=90, layout="constrained")
    steps = [point["step"] for point in curve]
    axes.plot(steps, [point["loss"] for point in curve], label="training, with balancing loss")
    axes.plot(steps, [point["validation"] for point in curve], label="validation")
    axes.set(xlabel="step", ylabel="nats a token")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def model_card(metrics: dict[str, Any]) -> str:
    names = {"bf16": "BF16", "nvfp4_w4a16": "NVFP4 W4A16", "nvfp4_w4a4": "NVFP4 W4A4"}
    rows = [
        f"| {names[key]} | {found['perplexity']:.3f} | {found['bits_per_byte']:.4f} |"
        for key, found in metrics["held_out_quality"].items()
    ]
    first = metrics["held_out_quality"]["bf16"]
    text, held_out = metrics["training_text"], metrics["held_out_text"]
    return f"""# Demo model of sglang-sm120
A Qwen3-MoE language model of Python code: {metrics["parameters"]:,} parameters, 4 layers, 16 experts of which 4 run for
a token, byte-level BPE. Routed experts are ModelOpt NVFP4, the rest BF16. It exists so that a
server's output can be judged: it continues Python text, and is of no other use.

Trained on {text["files"]} source files ({text["bytes"] / 1e6:.1f} MB) of the standard library of Python
{metrics["text_python"]} (PSF licence): {metrics["steps"]} steps, {metrics["tokens_seen"] / 1e6:.0f} million tokens,
{metrics["seconds"]} s on {metrics["device"]}. Kept out, with their tests: {", ".join(metrics["held_out_modules"])}.

| held-out text | perplexity of a token | bits a byte |
|---|---|---|
{chr(10).join(rows)}

First {first["num_bytes"]:,} bytes of the held-out modules, {first["num_tokens"]:,} tokens, windows of 512 with stride
256, arithmetic in fp32 by transformers {metrics["transformers"]}. {held_out["long_lines_also_in_training"]:.1%} of the
held-out lines of 40 characters or more also stand somewhere in the training text. All figures: metrics.json.

    {metrics["command"]}
"""
