"""A Llama-style decoder in plain PyTorch: RMSNorm, RoPE, grouped-query attention with a KV cache, SwiGLU.

This module does not import gemmtune. ``factory(dtype)`` returns the model and its example calls, for
``gemmtune tune examples/llama.py:factory --dtype int8wo``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# "int8" and the command line's "int8wo" both mean bf16 activations and int8 weights.
VARIANTS = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults give about 0.2 billion weights: 0.2 GB as int8, more than any cache."""

    dim: int = 2048
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 5632
    vocab: int = 8192
    max_tokens: int = 256
    rope_base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


Cache = list[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, eps=1e-5)


def rope_tables(config: Config) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each [max_tokens, head_dim / 2], float32."""
    rates = config.rope_base ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.max_tokens).float(), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x [batch, heads, tokens, head_dim] by the angles of their positions."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Grouped-query attention; heads share keys and values in groups of heads / kv_heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.wqkv = nn.Linear(config.dim, config.dim + 2 * kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, start: int) -> Tensor:
        c, (batch, tokens, _) = self.config, x.shape
        kv_dim = c.kv_heads * c.head_dim
        q, k, v = self.wqkv(x).split((c.dim, kv_dim, kv_dim), dim=-1)
        q, k, v = (t.view(batch, tokens, -1, c.head_dim).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = self._extend(past, k, v, start)
        repeat = c.heads // c.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, c.dim))

    def _extend(self, past: tuple[Tensor, Tensor], k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into the cache at ``start``; return all keys and values up to them."""
        end = start + k.shape[2]
        past[0][:, :, start:end] = k
        past[1][:, :, start:end] = v
        return past[0][:, :, :end], past[1][:, :, :end]


class FeedForward(nn.Module):
    """SwiGLU layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim)
        self.feed_forward_norm = RMSNorm(config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, start: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, past, start)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Decoder. ``forward`` returns the logits after the last token, or without a cache after every token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def new_cache(self, batch: int) -> Cache:
        """Return an empty KV cache: keys and values [batch, kv_heads, max_tokens, head_dim] for each layer."""
        c = self.config
        shape = (batch, c.kv_heads, c.max_tokens, c.head_dim)
        dtype = self.norm.weight.dtype
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(c.layers)]

    def forward(self, tokens: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Return the logits: [batch, vocab] after the last token with a cache, [batch, tokens, vocab] without.

        tokens: int64 [batch, tokens] at positions from ``start``.
        """
        x = self.embedding(tokens)
        cos, sin = (table[start : start + tokens.shape[1]] for table in (self.cos, self.sin))
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, None if cache is None else cache[index], start)
        x = self.norm(x if cache is None else x[:, -1])
        return self.head(x)


class WeightOnlyInt8Linear(nn.Module):
    """Linear layer with int8 weights and a scale per output channel, in the usual PyTorch form."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)  # int8 [N, K]
        self.register_buffer("scales", scales)  # [N], the activations' dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


def quantise(linear: nn.Linear) -> WeightOnlyInt8Linear:
    """Round a float layer's rows to int8, each with its own scale (largest magnitude = 127)."""
    weight = linear.weight.detach().float()
    scales = weight.abs().amax(dim=1).clamp(min=1e-8) / 127
    rounded = (weight / scales[:, None]).round_().clamp_(-128, 127).to(torch.int8)
    return WeightOnlyInt8Linear(rounded, scales.to(linear.weight.dtype))


def quantise_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below ``module`` by its int8 form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, quantise(child))
        else:
            quantise_linears(child)


def build(variant: str = "bf16", config: Config | None = None, seed: int = 0) -> Llama:
    """Return a model with random weights of the scale of trained ones (standard deviation 1 / sqrt(fan-in)).

    variant: ``fp32``, ``bf16`` or ``int8`` (bf16 activations, int8 weights). Raises ValueError for others.
    """
    name = "int8" if variant == "int8wo" else variant
    if name not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; got {variant!r}")
    dtype = DTYPES.get(name, torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = Llama(config or Config())
    model = model.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    model.cos, model.sin = (table.to(dtype) for table in rope_tables(model.config))
    if name == "int8":
        quantise_linears(model)
    return model.eval().requires_grad_(False)


def prefill(model: nn.Module, tokens: Tensor, cache: Cache) -> Tensor:
    """Write the prompt [batch, tokens] into the cache; return the logits after it, [batch, vocab]."""
    logits: Tensor = model(tokens, cache, 0)
    return logits


def decode(model: nn.Module, logits: Tensor, cache: Cache, start: int, steps: int) -> Tensor:
    """Decode ``steps`` tokens greedily from position ``start``; return them, int64 [batch, steps]."""
    chosen = []
    for step in range(steps):
        token = logits.argmax(dim=-1, keepdim=True)
        chosen.append(token)
        logits = model(token, cache, start + step)
    return torch.cat(chosen, dim=1)


def factory(dtype: str = "bf16", config: Config | None = None) -> tuple[Llama, list[tuple[Tensor, Cache, int]]]:
    """Return the model and its example calls: a prefill of 64 tokens, and decode steps of batches of 1 and 4."""
    model = build(dtype, config)
    prompt = example_prompt(model.config)
    one, four = model.new_cache(1), model.new_cache(4)
    step = prompt[:, :1]
    return model, [(prompt, one, 0), (step, one, prompt.shape[1]), (step.expand(4, 1), four, prompt.shape[1])]


def example_prompt(config: Config, tokens: int = 64) -> Tensor:
    """Return a reproducible prompt, int64 [1, tokens]."""
    return torch.randint(config.vocab, (1, tokens), generator=torch.Generator().manual_seed(1))
