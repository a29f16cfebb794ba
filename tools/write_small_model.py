"""Write a small random NVFP4 mixture-of-experts checkpoint, and the same dequantised for transformers.

    python tools/write_small_model.py glm4_moe OUT --format modelopt

OUT gets three folders: bf16 (as transformers writes it), nvfp4 (to serve), dequantised (to compare with).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_sm120.testing.checkpoints import (
    FORMATS,
    MODEL_STYLES,
    dequantize_checkpoint,
    quantize_checkpoint,
    write_random_model,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("style", choices=MODEL_STYLES)
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--format", choices=FORMATS, default="modelopt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--weight-only", action="store_true", help="without activation scales (W4A16)")
    args = parser.parse_args()
    bf16 = write_random_model(args.out / "bf16", args.style, seed=args.seed, num_experts=args.experts)
    nvfp4 = quantize_checkpoint(bf16, args.out / "nvfp4", args.format, w4a16_only=args.weight_only)
    dequantize_checkpoint(nvfp4, args.out / "dequantised")
    for folder in ("bf16", "nvfp4", "dequantised"):
        size = sum(file.stat().st_size for file in (args.out / folder).iterdir())
        print(f"{args.out / folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
