"""Call fused_moe's kernels with random layers, routings and activations, and hold each result against the reference.

python tools/fuzz_moe.py --calls 10000 [--device cuda|cpu] [--seed S] [--first N]

The reference is `backend="reference"` on the same device, itself held against float64 by the tests. A call depends on
the seed and its number only: `--seed S --first N --calls 1` repeats one. On the CPU kernels run as built for the host.
Exit code 1 when a call failed.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sglang_sm120.errors import Sm120Error
from sglang_sm120.kernels.moe.fused_moe.api import MoeActivation, Nvfp4MoeWeights, backend_reason, fused_moe
from sglang_sm120.kernels.quantization.nvfp4.api import swizzle_blockscale

LAYERS = 12  # of a seed, made once
SHOWN = 10  # failures that are printed

# Of a row's norm. Slots are rounded to the dtype before they are added, in the reference after. W4A4: a rounding in
# fp32 may move a code, or the scale of 16 of them, by a step. That is rare, and can be much of a row with one slot: one
# row in twenty, and one more, may be off by up to MOVED of its norm. What is wrong is off by about all of it.
TOLERANCE = {("w4a16", torch.bfloat16): 8e-3, ("w4a16", torch.float16): 1.5e-3}
TOLERANCE |= {("w4a4", torch.bfloat16): 4e-2, ("w4a4", torch.float16): 4e-2}
MOVED = 0.3


@dataclass
class Layer:
    weights: Nvfp4MoeWeights
    offset: int
    num_global_experts: int | None


def make_layer(seed: str, device: torch.device) -> Layer:
    pick = random.Random(seed)
    generator = torch.Generator(device).manual_seed(pick.getrandbits(40))
    experts = pick.choice((1, 2, 5, 8, 8, 16))
    aligned = pick.random() < 0.5
    hidden = 256 * pick.randint(1, 8) if aligned else 32 * pick.randint(1, 60)
    intermediate = 128 * pick.randint(1, 3) if aligned else 32 * pick.randint(1, 13)
    if pick.random() < 0.1:
        hidden += 16  # what only prefill covers
    is_gated = pick.random() < 0.7
    rows = (2 if is_gated else 1) * intermediate

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    def scales(count: int, width: int) -> torch.Tensor:
        drawn = torch.randint(8, 64, (experts, count, width), dtype=torch.uint8, device=device, generator=generator)
        swizzled = swizzle_blockscale(drawn.view(torch.float8_e4m3fn)).view(torch.uint8)
        swizzled[swizzled == 0] = 0x7F  # NaN in the padding
        return swizzled.view(torch.float8_e4m3fn)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator) * (high - low) + low

    wide, deep = hidden**-0.5, intermediate**-0.5
    shapes = [(experts, 2), (experts, 1), (experts,)] if is_gated else [(experts, 1), (experts,)]
    one_scale = pick.random() < 0.5
    weights = Nvfp4MoeWeights(
        w13_weight=codes(experts, rows, hidden // 2),
        w13_blockscale=scales(rows, hidden // 16),
        w13_global_scale=uniform(0.3 * wide, 2 * wide, *pick.choice(shapes)),
        w2_weight=codes(experts, hidden, intermediate // 2),
        w2_blockscale=scales(hidden, intermediate // 16),
        w2_global_scale=uniform(0.3 * deep, 2 * deep, experts),
        w13_input_scale=uniform(0.001, 0.01, *(() if one_scale else (experts,))),
        w2_input_scale=uniform(0.001, 0.01, *((1,) if one_scale else (experts,))),
        w13_order=pick.choice(("up_gate", "gate_up")),
        is_gated=is_gated,
    )
    if pick.random() < 0.3:
        return Layer(weights, experts, 3 * experts)
    return Layer(weights, 0, None)


def make_activation(pick: random.Random, is_gated: bool) -> MoeActivation:
    if not is_gated:
        return MoeActivation(pick.choice(("silu", "gelu", "relu2", "identity")))
    if pick.random() < 0.6:
        return MoeActivation(pick.choice(("silu", "gelu")))
    return MoeActivation("silu", pick.choice((None, 1.702)), pick.choice((None, 0.5)), pick.choice((0.5, 2.0, 7.0)))


def make_ids(
    pick: random.Random, layer: Layer, tokens: int, top_k: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    experts, total = layer.weights.num_experts, layer.num_global_experts or layer.weights.num_experts
    kind = pick.choice(("any", "any", "distinct", "one", "skips", "few"))
    shape = (tokens, top_k)
    if kind == "distinct" and top_k <= total:
        ids = torch.rand(tokens, total, device=device, generator=generator).topk(top_k, dim=1).indices
    elif kind == "one":
        ids = torch.full(shape, layer.offset + pick.randrange(experts), device=device)
    else:
        ids = torch.randint(0, total if kind != "few" else min(total, 3), shape, device=device, generator=generator)
    if kind == "skips" or pick.random() < 0.1:
        share = pick.choice((0.1, 0.5, 0.9, 1.0))
        ids = torch.where(torch.rand(shape, device=device, generator=generator) < share, -1, ids)
    return ids.to(pick.choice((torch.int32, torch.int64)))


def fuzz_call(seed: int, number: int, layers: dict[int, Layer], device: torch.device) -> tuple[float, str]:
    """The worst error of a row in units of its tolerance, and what was called. One wait for the GPU."""
    pick = random.Random(f"{seed} {number}")
    generator = torch.Generator(device).manual_seed(pick.getrandbits(40))
    index = pick.randrange(LAYERS)
    if index not in layers:
        layers[index] = make_layer(f"{seed} layer {index}", device)
    layer = layers[index]
    weights = layer.weights

    most = pick.choice((1, 4, 17, 65) if device.type == "cpu" else (1, 4, 16, 65, 300))
    tokens, top_k = pick.randint(1, most), pick.choice((1, 2, 4, 8, 10))
    dtype = pick.choice((torch.bfloat16, torch.float16))
    numerics = pick.choice(("w4a16", "w4a16", "w4a16", "w4a4"))
    activation = make_activation(pick, weights.is_gated)
    x = torch.randn(tokens, weights.hidden_size + 24, device=device, generator=generator).to(dtype)
    first = pick.choice((0, 8, 3))
    x = x[:, first : first + weights.hidden_size]  # strided, and aligned or not
    if pick.random() < 0.5:
        x = x.contiguous()
    topk_weights = torch.rand(tokens, top_k, device=device, generator=generator)
    ids = make_ids(pick, layer, tokens, top_k, generator, device)
    poisoned = pick.randrange(tokens) if pick.random() < 0.2 else None
    if poisoned is not None:
        x[poisoned, pick.randrange(weights.hidden_size)] = float("nan")

    common = {"activation": activation, "numerics": numerics}
    covers = [
        name
        for name in ("decode", "middle", "prefill")
        if backend_reason(name, weights, ids.numel(), hidden_dtype=dtype, device=device, **common) is None
    ]
    backend = pick.choice(covers)
    routing = {
        "expert_offset": layer.offset,
        "num_global_experts": layer.num_global_experts,
        "apply_router_weight_on_input": top_k == 1 and pick.random() < 0.3,
    }
    call = f"{backend} {numerics} {dtype} tokens={tokens} k={top_k} E={weights.num_experts} H={weights.hidden_size} "
    call += f"I={weights.intermediate_size} gated={weights.is_gated} {activation} {routing} NaN in row {poisoned}"
    got = fused_moe(x, weights, topk_weights, ids, backend=backend, **common, **routing)
    want = fused_moe(x, weights, topk_weights, ids, backend="reference", **common, **routing)
    nan = want.isnan()
    difference = (got.double() - want.double()).masked_fill(nan, 0).norm(dim=1)
    size = want.double().masked_fill(nan, 0).norm(dim=1)
    tolerance = TOLERANCE[numerics, dtype]
    errors = (difference / (size * tolerance + 1e-30)).sort(descending=True).values
    moved = 1 + len(errors) // 20 if numerics == "w4a4" else 0
    error = errors[moved:].max() if len(errors) > moved else torch.zeros((), dtype=torch.float64, device=device)
    if moved:
        error = torch.maximum(error, errors[0] * tolerance / MOVED)
    misplaced = (got.isnan() != nan).any()
    return float(torch.where(misplaced, torch.inf, error)), call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)

    layers: dict[int, Layer] = {}
    worst, failed = 0.0, 0
    progress = tqdm(range(options.first, options.first + options.calls), unit="call", dynamic_ncols=True)
    for number in progress:
        again = f"python tools/fuzz_moe.py --device {device} --seed {options.seed} --first {number} --calls 1"
        try:
            error, call = fuzz_call(options.seed, number, layers, device)
        except (Sm120Error, RuntimeError) as raised:
            error, call = float("inf"), f"raised {raised}"
        worst = max(worst, error)
        if not error <= 1:
            failed += 1
            if failed <= SHOWN:
                tqdm.write(f"call {number}: {error:.3g} times the tolerance: {call}\n  {again}")
        progress.set_postfix(worst=f"{worst:.2f}", failed=failed, refresh=False)
    print(f"{options.calls} calls, {failed} failed, worst error {worst:.2f} of its tolerance (seed {options.seed})")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
