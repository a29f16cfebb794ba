"""Runners that are wrong on purpose, loaded into a real server's processes as a plugin of SGLang.

`planted_environment(folder, kind)` writes the plugin's entry point beside a copy of this file and returns what to set.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

KINDS = ("swapped", "unscaled", "mxfp4")


def planted_environment(folder: Path, kind: str) -> dict[str, str]:
    """Environment for a server whose `native` runner is wrong in one way."""
    assert kind in KINDS
    shutil.copy(__file__, folder / "sm120_planted.py")
    info = folder / "sm120_planted-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sm120-planted\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nsm120_planted = sm120_planted:register\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SM120_PLANTED": kind}


def register() -> None:
    """Called by SGLang in every process."""
    from sglang_sm120.runners.native import NativeRunner

    bind = NativeRunner.bind
    change = {"swapped": _swapped, "unscaled": _unscaled, "mxfp4": _mxfp4}[os.environ["SM120_PLANTED"]]

    def bind_wrong(self, weights, spec, numerics):
        right = bind(self, weights, spec, numerics)
        return lambda hidden_states, weights, router, ids: right(hidden_states, change(weights), router, ids)

    NativeRunner.bind = bind_wrong  # type: ignore[method-assign]


def _swapped(weights):
    return dataclasses.replace(weights, w13_order="gate_up")


def _unscaled(weights):
    return dataclasses.replace(weights, w2_global_scale=weights.w2_global_scale * 0 + 1)


def _mxfp4(weights):
    """Scales read as powers of two: their mantissa is lost."""
    import torch

    kept = weights.w13_blockscale.view(torch.uint8) & 0x78
    return dataclasses.replace(weights, w13_blockscale=kept.view(torch.float8_e4m3fn))
