"""Writes contracts.json, the digests of what the foreign runners rely on, from sources that were read and understood.

    python tests/runners/contract_sources.py FOLDER_WITH_FLASHINFER

The other way round, test_contracts.py compares an installed or unpacked FlashInfer (FLASHINFER_SOURCE) with the file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from sglang_sm120.integration.check import source_digest

FILE = Path(__file__).with_name("contracts.json")

_B12X = "flashinfer/experimental/b12x/moe"
_MODELOPT = "sglang/srt/layers/quantization/modelopt_quant.py"
_CUTLASS = "sglang/srt/layers/moe/moe_runner/flashinfer_cutlass.py"
_TENSORS = "sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4_moe.py"

# file -> definitions, dotted; "*": the whole file
FLASHINFER: Mapping[str, tuple[str, ...]] = {
    "flashinfer/fused_moe/core.py": ("cutlass_fused_moe", "cutlass_fused_moe_workspace_size"),
    "flashinfer/data/csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu": ("*",),
    "flashinfer/autotuner/autotuner.py": ("autotune",),
    "b12x/__init__.py": ("*",),
    f"{_B12X}/fused_moe/api.py": ("plan_weights", "prepare_weights", "bind", "run"),
    f"{_B12X}/fused_moe/_compat.py": ("Caps",),
    f"{_B12X}/fused_moe/_impl.py": (
        "_normalize_w13_layout_for_activation",
        "_ensure_w13_kernel_order_inplace",
        "_prepare_expert_scale_vector",
        "_prepare_modelopt_nvfp4_runtime_alphas",
        "plan_b12x_fp4_moe_weights",
        "prepare_b12x_fp4_moe_weights",
        "plan_tp_moe_scratch",
        "B12XFP4ExpertWeights",
        "TPMoEScratchCaps",
        "TPMoEScratchPlan",
        "b12x_moe_fp4",
    ),
    f"{_B12X}/_shared/execution.py": ("WeightStoragePolicy", "plan_moe_weight_preparation"),
    f"{_B12X}/_shared/kernels/reference.py": ("_gated_row_slices", "_apply_gated_activation", "_trace_nvfp4_route"),
}
SGLANG: Mapping[str, tuple[str, ...]] = {
    _CUTLASS: (
        "materialize_swiglu_params_for_cutlass",
        "_cutlass_moe_tune_max_num_tokens",
        "_activation_type",
        "_prescale_router_weight_on_input",
        "_prepare_input",
        "_run_flashinfer_cutlass",
    ),
    _MODELOPT: (
        "_compute_gemm1_alphas",
        "ModelOptNvFp4FusedMoEMethod.process_weights_after_loading",
        "ModelOptNvFp4FusedMoEMethod.apply",
    ),
    _TENSORS: (
        "CompressedTensorsW4A4Nvfp4MoE.process_weights_after_loading",
        "CompressedTensorsW4A4Nvfp4MoE.apply_weights",
    ),
    "sglang/srt/layers/moe/moe_runner/flashinfer_trtllm.py": ("get_activation_type",),
}


def find(tree: ast.AST, dotted: str) -> ast.AST | None:
    for name in dotted.split("."):
        found = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name]
        if not found:
            return None
        tree = found[-1]
    return tree


def digests(root: Path, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """ "file:definition" -> digest; "missing" where there is none."""
    result = {}
    for name, definitions in wanted.items():
        file = root / name
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        tree = ast.parse(text) if file.suffix == ".py" else None
        for definition in definitions:
            if definition == "*":
                digest = hashlib.sha256(text.encode()).hexdigest()[:16] if text else "missing"
            else:
                assert tree is not None, name
                node = find(tree, definition)
                digest = "missing" if node is None else source_digest(text, node)
            result[f"{name}:{definition}"] = digest
    return result


def main() -> None:
    from sglang_sm120.doctor.checks import sglang_tree

    sglang = sglang_tree()
    assert sglang is not None
    data = {
        "flashinfer-python 0.7.2": digests(Path(sys.argv[1]), FLASHINFER),
        "sglang 0.5.23": digests(sglang.parent, SGLANG),
    }
    assert "missing" not in {digest for group in data.values() for digest in group.values()}, data
    FILE.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
