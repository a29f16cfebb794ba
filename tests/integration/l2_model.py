"""A model of the parts that SGLang's have, small and without SGLang, for the tests of --sm120-l2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN = 32


class Core(nn.Module):
    """Stands for RadixAttention; k_scale, as there, is not read from memory."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Experts(nn.Module):
    """Stands for FusedMoE."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.ones(4, HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w13_weight[0, 0]


class Quantised(nn.Module):
    """A projection with a packed weight, as NVFP4's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN, dtype=torch.uint8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(HIDDEN, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0, 0]


class Attention(nn.Module):
    def __init__(self, mla: bool) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.kv_b_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rotary_emb = nn.Embedding(512, HIDDEN)
        self.attn = Core()
        self.o_proj = Quantised()
        if mla:
            self.w_kc, self.w_vc = torch.ones(2, 8, 8), torch.ones(2, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attn(self.qkv_proj(x)))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = Experts()
        self.shared_experts = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared_experts(x)


class Decoder(nn.Module):
    def __init__(self, mla: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = Attention(mla)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.mlp = Ffn()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x + self.self_attn(self.input_layernorm(x))))


class Backbone(nn.Module):
    def __init__(self, layers: int, mla: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, HIDDEN)
        self.layers = nn.ModuleList([*(Decoder(mla) for _ in range(layers)), nn.Identity()])  # as PPMissingLayer

    def forward(self, input_ids: Tensor, forward_batch: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, layers: int = 2, mla: bool = False) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.model = Backbone(layers, mla)
        self.lm_head = nn.Linear(HIDDEN, 100)

    def forward(self, tokens: int, *, graph: bool) -> Tensor:
        ids = torch.zeros(tokens, dtype=torch.int64)
        mode = SimpleNamespace(is_cuda_graph=lambda: graph)
        return self.lm_head(self.model(ids, forward_batch=SimpleNamespace(input_ids=ids, forward_mode=mode)))
