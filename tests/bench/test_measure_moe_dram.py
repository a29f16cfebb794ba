"""tools/measure_moe_dram.py: how ncu's table is read, and what a GEMM cannot do without."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_sm120.bench.options import ModelShape
from sglang_sm120.errors import UnsupportedError

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "measure_moe_dram.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_moe_dram", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclass looks there
    spec.loader.exec_module(module)
    return module


def csv(*launches: tuple[str, str, str, str]) -> str:
    """As ncu prints it, after its own lines."""
    lines = ["==PROF== Connected", '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    names = ("dram__bytes_read.sum", "lts__t_sector_hit_rate.pct", "gpu__time_duration.sum")
    for number, (kernel, *values) in enumerate(launches):
        for name, value in zip(names, values, strict=True):
            lines.append(f'"{number}","7","{kernel}","{name}","unit","{value}"')
    return "\n".join(lines) + "\n"


def test_launches_are_split_at_the_markers(tool: ModuleType) -> None:
    spin = ("at::cuda::spin_kernel(long)", "0", "0", "1,000")
    first = ("gemm1_gated_bf16(Args)", "3,000,000", "12.5", "20,500")
    second = ("gemm2_bf16(Args)", "1000000", "50", "9000")
    groups = sys.modules["ncu_table"].groups_of_kernels(csv(spin, first, second, spin, first))
    assert [[kernel.name for kernel in group] for group in groups] == [[first[0], second[0]], [first[0]]]
    assert groups[0][0] == tool.Kernel(first[0], 3e6, 12.5, 20.5)
    other = {"model": "m", "tokens": 4, "backend": "decode", "order": "row_major"}
    floors = [{**other, "floor_bytes": (2_000_000, 500_000)}, {**other, "floor_bytes": (1_000_000, 1)}]
    rows = tool.table(floors, groups).splitlines()[2:]
    assert rows[0] == "| m | 4 | decode | row_major | gemm1_gated_bf16 | 3.00 | 2.00 | 1.500 | 12.5 | 20.5 |"
    assert rows[1] == "| m | 4 | decode | row_major | gemm2_bf16 | 1.00 | 0.50 | 2.000 | 50.0 | 9.0 |"
    assert len({row.count("|") for row in rows}) == 1


def test_the_plot(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for every order and number of tokens, as high as both GEMMs' bytes over their floors."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    heights: list[list[float]] = []
    draw_bars = Axes.bar

    def bar(axes: Axes, places: list[float], values: list[float], *rest, **more):
        heights.append(values)
        return draw_bars(axes, places, values, *rest, **more)

    monkeypatch.setattr(Axes, "bar", bar)
    other = {"model": "m", "backend": "middle", "floor_bytes": (4e6, 1e6)}
    configurations = [
        {**other, "tokens": tokens, "order": order} for tokens in (256, 1000) for order in ("column_major", "row_major")
    ]
    schedule, second = tool.Kernel("expert_schedule", 1e9, 99, 99), tool.Kernel("gemm2_bf16", 0, 30, 4)
    groups = [[schedule, tool.Kernel("gemm1_bf16", 5e6 * n, 10 * n, 3), second] for n in (1, 2, 3, 4)]
    tool.draw(configurations, groups, "title", str(tmp_path / "orders.png"))
    assert (tmp_path / "orders.png").read_bytes().startswith(b"\x89PNG")
    assert heights == [[1, 3], [2, 4], [20, 30], [25, 35], [7, 7], [7, 7]]


def test_output_without_a_table_is_an_error_with_its_text(tool: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match="ERR_NVGPUCTRPERM"):
        sys.modules["ncu_table"].groups_of_kernels("==ERROR== ERR_NVGPUCTRPERM\n")


def test_floor_by_hand(tool: ModuleType) -> None:
    """Two active experts; w13 of 512 x 512, w2 of 512 x 256; 3 tokens, 2 slots each."""
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
    want = (2 * 512 * (256 + 32) + 3 * 512 * 2, 2 * 512 * (128 + 16) + 6 * 256 * 2)
    assert tool.floor_bytes(ModelShape("", 4, 2, 512, 256), ids) == want


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused on a machine without a CUDA GPU only")
def test_without_a_gpu_there_is_one_clear_error() -> None:
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "a CUDA GPU" in done.stderr
    assert "Traceback" not in done.stderr
