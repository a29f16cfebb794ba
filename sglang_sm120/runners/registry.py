"""The runners by name."""

from __future__ import annotations

from sglang_sm120.runners.b12x import B12xRunner
from sglang_sm120.runners.base import MoeRunner
from sglang_sm120.runners.flashinfer_cutlass import FlashinferCutlassRunner
from sglang_sm120.runners.native import NativeRunner, ReferenceRunner

RUNNERS: dict[str, MoeRunner] = {
    runner.name: runner for runner in (NativeRunner(), FlashinferCutlassRunner(), B12xRunner(), ReferenceRunner())
}
