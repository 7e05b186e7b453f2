"""The drafter: a small Qwen3-shaped stack over the target's features, with two heads.

One block has an anchor (the newest token, position a) and block_size - 1 mask tokens at positions
a+1 ...; slot k predicts the token at position a+1+k. A block's queries see

    context  target positions 0 .. a-1, as keys and values made from the target's hidden states:
             k, v = proj(hidden_norm(fc(features))); the anchor itself has no hidden state yet
    block    all block_size slots of the same block, in both directions

Module names equal the tensor names of the DeepSpec checkpoint, so `state_dict()` nearly is the
checkpoint; `feature_scale` is folded into `fc` at export.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_drafter.config import DrafterConfig
from examples.train_drafter.target import apply_rope, rope_table


class Linear(nn.Linear):
    """Master weight in float32, product in the dtype of the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a float32 master weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Block queries over context keys made from target features, plus the block's own keys."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden_size, c.num_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[S, N, heads * D] -> [S, heads, N, D]."""
        return x.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)

    def forward(
        self, x: Tensor, context: Tensor, query_rope: Tensor, context_rope: Tensor, mask: Tensor
    ) -> Tensor:
        """x [S, Q, H], context [S, T, H], mask [S, 1, Q, T + Q] -> [S, Q, H]."""
        q = apply_rope(self.q_norm(self._heads(self.q_proj(x))), *query_rope)
        k_block = apply_rope(self.k_norm(self._heads(self.k_proj(x))), *query_rope)
        k_context = apply_rope(self.k_norm(self._heads(self.k_proj(context))), *context_rope)
        k = torch.cat([k_context, k_block], dim=2)
        v = torch.cat([self._heads(self.v_proj(context)), self._heads(self.v_proj(x))], dim=2)
        group = self.c.num_heads // self.c.num_kv_heads
        # Repeated because masked attention kernels do not take grouped heads.
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *args)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Low-rank bias on the logits from the previous token: W2 @ W1[token]."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(c.vocab_size, c.markov_rank)
        self.markov_w2 = Linear(c.markov_rank, c.vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.normal_(self.markov_w2.weight, std=0.02)


class ConfidenceHead(nn.Module):
    """Logit of P(accepted) from the slot's hidden state and the Markov embedding, float32."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + c.markov_rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, markov: Tensor) -> Tensor:
        return self.proj(torch.cat([hidden, markov], dim=-1).float()).squeeze(-1)


class DSparkDrafter(nn.Module):
    """All trained tensors; embedding and head come from the target at call time."""

    feature_scale: Tensor
    rope: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = c = config
        self.fc = Linear(c.feature_size, c.hidden_size)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = MarkovHead(c)
        self.confidence_head = ConfidenceHead(c)
        for layer in self.layers:  # small residual branches at the start
            layer.self_attn.o_proj.weight.data.mul_((2 * c.num_layers) ** -0.5)
            layer.mlp.down_proj.weight.data.mul_((2 * c.num_layers) ** -0.5)
        # 1 / rms of each target feature, measured once: some channels are hundreds of times
        # larger than others, and one learning rate must fit all.
        self.register_buffer("feature_scale", torch.ones(c.feature_size))
        rope = rope_table(c.max_positions, c.head_dim, c.rope_theta, "cpu")
        self.register_buffer("rope", rope, persistent=False)

    def attention_mask(self, anchors: Tensor, length: int) -> Tensor:
        """anchors [S, A] -> bool [S, 1, A*K, length + A*K], True where a query may look."""
        rows, blocks = anchors.shape
        size = self.config.block_size
        start = anchors.repeat_interleave(size, dim=1)
        context = torch.arange(length, device=anchors.device) < start[:, :, None]
        owner = torch.arange(blocks, device=anchors.device).repeat_interleave(size)
        same = (owner[:, None] == owner).expand(rows, -1, -1)
        return torch.cat([context, same], dim=-1)[:, None]

    def forward(self, tokens: Tensor, features: Tensor, anchors: Tensor, embed: Tensor) -> Tensor:
        """Hidden state of every block slot, after the final norm.

        tokens [S, T], features [S, T, feature_size], anchors [S, A] positions into T,
        embed [V, H] -> [S, A, K, H] in the dtype of `embed`.
        """
        rows, length = tokens.shape
        size = self.config.block_size
        blocks = anchors.shape[1]
        ids = tokens.new_full((rows, blocks, size), self.config.mask_token_id)
        ids[:, :, 0] = tokens.gather(1, anchors)
        x = F.embedding(ids.flatten(1), embed)
        positions = (anchors[:, :, None] + torch.arange(size, device=anchors.device)).flatten(1)
        query_rope = self.rope[:, positions][:, :, None]  # [2, S, 1, Q, D]
        context_rope = self.rope[:, None, None, :length]  # [2, 1, 1, T, D]
        mask = self.attention_mask(anchors, length)
        scaled = (features * self.feature_scale).to(x.dtype)
        context = self.hidden_norm(self.fc(scaled))
        for layer in self.layers:
            x = layer(x, context, query_rope, context_rope, mask)
        return self.norm(x).unflatten(1, (blocks, size))

    def markov_embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Markov embedding of previous tokens, [...] -> [..., r]."""
        return F.embedding(tokens, self.markov_head.markov_w1.weight).to(dtype)

    def logits(self, hidden: Tensor, markov: Tensor, embed: Tensor) -> Tensor:
        """Draft logits: hidden [N, H], markov [N, r], embed [V, H] -> [N, V]."""
        w2 = self.markov_head.markov_w2.weight.to(hidden.dtype)
        return torch.addmm(F.linear(hidden, embed), markov, w2.t())

    @torch.no_grad()
    def calibrate_features(self, features: Tensor, valid: Tensor) -> None:
        """Set `feature_scale` from features [S, T, F] at positions where valid [S, T]."""
        chosen = features[valid].float()
        self.feature_scale.copy_(chosen.pow(2).mean(0).sqrt().clamp_min(1e-3).reciprocal())
