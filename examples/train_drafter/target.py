"""The frozen target: a Llama forward in plain torch, for features, logits and fast decoding.

Written out instead of taken from transformers for two reasons: training wants the chosen layers'
outputs and only some positions' logits, and generation wants one fixed-shape step that a CUDA
graph can hold. Weights come from a Hugging Face folder or straight from a GGUF file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_drafter.decode_attention import decode_attention


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a Llama-shaped target; the default is SmolLM2-135M."""

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0
    eos_token_id: int = 2


@dataclass
class Layer:
    """Weights of one decoder layer, projections that read the same input fused."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv_heads) * D, H]
    out: Tensor  # [H, heads * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


def rope_table(positions: int, head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """[2, positions, head_dim] cosines and sines, halves repeated (the NeoX layout)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    angle = torch.cat([angle, angle], dim=-1)
    return torch.stack([angle.cos(), angle.sin()]).float().to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., D]; `cos` and `sin` broadcast against it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


class FrozenTarget:
    """A target whose weights never change; every method runs without gradients."""

    def __init__(
        self, shape: TargetShape, embed: Tensor, norm: Tensor, layers: list[Layer]
    ) -> None:
        self.shape = shape
        self.embed = embed  # [V, H], also the head (tied)
        self.norm = norm  # [H]
        self.layers = layers
        self.rope = rope_table(8192, shape.head_dim, shape.rope_theta, embed.device)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @classmethod
    def load(
        cls, path: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> FrozenTarget:
        """Read a Hugging Face folder (safetensors) or a GGUF file."""
        if path.suffix == ".gguf":
            from transformers import AutoModelForCausalLM, GgufConfig

            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype,
            )
            config, weights = model.config.to_dict(), model.state_dict()
        else:
            from safetensors.torch import load_file

            config = json.loads((path / "config.json").read_text())
            weights = load_file(str(path / "model.safetensors"))
        rope = config.get("rope_parameters") or {}
        shape = TargetShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or config["rope_theta"],
            eos_token_id=config["eos_token_id"],
        )
        return cls.from_state_dict(shape, weights, device, dtype)

    @classmethod
    def from_state_dict(
        cls, shape: TargetShape, weights: dict[str, Tensor], device: str, dtype: torch.dtype
    ) -> FrozenTarget:
        """Fuse a Hugging Face Llama state dict."""

        def take(*names: str) -> Tensor:
            return torch.cat([weights[n] for n in names]).to(device=device, dtype=dtype)

        layers = []
        for i in range(shape.num_layers):
            p = f"model.layers.{i}."
            attn = p + "self_attn."
            layers.append(
                Layer(
                    take(p + "input_layernorm.weight"),
                    take(*(f"{attn}{n}_proj.weight" for n in "qkv")),
                    take(attn + "o_proj.weight"),
                    take(p + "post_attention_layernorm.weight"),
                    take(p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"),
                    take(p + "mlp.down_proj.weight"),
                )
            )
        return cls(shape, take("model.embed_tokens.weight"), take("model.norm.weight"), layers)

    @classmethod
    def random(cls, shape: TargetShape, seed: int = 0, device: str = "cpu") -> FrozenTarget:
        """A random target for tests, float32."""
        g = torch.Generator().manual_seed(seed)
        s = shape

        def matrix(rows: int, cols: int) -> Tensor:
            return (torch.randn(rows, cols, generator=g) * cols**-0.5).to(device)

        ones = torch.ones(s.hidden_size, device=device)
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        layers = [
            Layer(
                ones,
                matrix(width, s.hidden_size),
                matrix(s.hidden_size, s.num_heads * s.head_dim),
                ones,
                matrix(2 * s.intermediate_size, s.hidden_size),
                matrix(s.hidden_size, s.intermediate_size),
            )
            for _ in range(s.num_layers)
        ]
        return cls(s, matrix(s.vocab_size, s.hidden_size), 2 * ones, layers)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def _qkv(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Rotated queries, rotated keys and values, each [..., heads, D]."""
        s = self.shape
        fused = F.linear(self._normed(x, layer.input_norm), layer.qkv)
        fused = fused.unflatten(-1, (-1, s.head_dim))
        q, k, v = fused.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=-2)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        collect: tuple[int, ...] = (),
        cache: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run whole sequences.

        tokens [S, T] -> final hidden state after the last norm [S, T, H], and the outputs of the
        layers in `collect`, concatenated [S, T, len(collect) * H]. With `cache` (see `new_cache`)
        keys and values of row i go to slot `slots[i]`.
        """
        x = F.embedding(tokens, self.embed)
        length = tokens.shape[1]
        cos, sin = self.rope[:, :length, None]
        collected: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            q, k, v = (t.transpose(1, 2) for t in self._qkv(x, layer, cos, sin))
            if cache is not None:
                cache[i, 0, slots, :, :length] = k
                cache[i, 1, slots, :, :length] = v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
            x = x + self._mlp(x, layer)
            if i in collect:
                collected[i] = x
        features = torch.cat([collected[i] for i in collect], -1) if collect else x[..., :0]
        return self._normed(x, self.norm), features

    def new_cache(self, slots: int, length: int) -> Tensor:
        """[layers, 2, slots, kv_heads, length, D] zeros for `decode`."""
        s = self.shape
        size = (s.num_layers, 2, slots, s.num_kv_heads, length, s.head_dim)
        return torch.zeros(size, dtype=self.embed.dtype, device=self.device)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """One token for every slot: tokens [B], positions [B] -> logits [B, V]."""
        x = F.embedding(tokens, self.embed)
        cos, sin = self.rope[:, positions, None]
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(x, layer, cos, sin)
            cache[i, 0, rows, :, positions] = k
            cache[i, 1, rows, :, positions] = v
            mixed = decode_attention(q, cache[i, 0], cache[i, 1], positions + 1)
            x = x + F.linear(mixed.flatten(1), layer.out)
            x = x + self._mlp(x, layer)
        return self.logits(self._normed(x, self.norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] through the tied head."""
        return F.linear(hidden, self.embed)
