"""The drafter embedded in DeepSeek-V4: three decoder stages over one block, in plain torch.

Equations as in the target's own layers (DeepSeek-V4: MLA with one shared key/value per token,
manifold-constrained hyper-connections, sqrt-softplus routing), with the block's queries attending
to the last `window` context tokens and to the whole block, both ways. Context keys come from the
target: main_x = norm(main_proj [x_l1 ; x_l2 ; ...]), of which every stage makes its own.

Streams (m copies of the residual, X [.., m, H]); a sub-layer f with norm g:

    u = vec(X) / rms(vec(X)) @ fn^T                              [.., (2 + m) m]
    pre = sigmoid(s0 u_pre + b_pre) + eps        post = 2 sigmoid(s1 u_post + b_post)
    comb = sinkhorn(softmax(s2 u_comb + b_comb))                 rows, then columns, repeatedly
    X'_j = post_j f(g(sum_i pre_i X_i)) + sum_i comb_ij X_i

Arithmetic is in the weights' dtype: float32 in an engine, float64 in tests. Sizes: R requests, Q
queries of a block, W context tokens kept, D the key/value size, m streams.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import ConfidenceHead, DraftHead, MarkovHead
from vllm_dspark.proposer.embedded import StageSpec

NEG_INF = float("-inf")
# Factor on the gate that writes a sub-layer's output back into the streams.
POST_SCALE = 2.0


@dataclass(frozen=True)
class Context:
    """What a block sees of the tokens before it.

    keys: [S, R, W, D] of each stage, normed and rotated; padding anywhere in a row.
    valid: [R, W] bool, False for padding and for tokens outside the window.
    """

    keys: torch.Tensor
    valid: torch.Tensor


class EmbeddedStages:
    """The stages' weights and arithmetic.

    tensors: checkpoint names (`mtp.{i}.*`) -> plain tensors; see `dequantise` for packed ones.
    """

    def __init__(
        self, spec: StageSpec, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        if spec.is_v41:
            raise DrafterError(
                f"{spec.file}: a DeepSeek-V4.1 drafter: its stages mix streams without a learned "
                "head, which this implementation does not have; serve it on CUDA"
            )
        self.spec = spec
        self.dtype = dtype
        self.weights = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        self._last = f"mtp.{spec.num_stages - 1}."

    def main(self, aux: torch.Tensor) -> torch.Tensor:
        """[.., L * H] hidden states of the target's layers -> [.., H] what context keys are of."""
        projected = F.linear(aux.to(self.dtype), self.weights["mtp.0.main_proj.weight"])
        return self._norm(projected, "mtp.0.main_norm.weight")

    def context_keys(self, main: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[S, n, D] keys of every stage for n context tokens; main: [n, H], positions: [n]."""
        return torch.stack(
            [self._keys(f"mtp.{i}.", main, positions) for i in range(self.spec.num_stages)]
        )

    def hidden(
        self, embeds: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """[R, Q, H] head hidden states, before the final norm; embeds: [R, Q, H]."""
        streams = embeds.to(self.dtype).unsqueeze(-2).repeat(1, 1, self.spec.streams, 1)
        for stage in range(self.spec.num_stages):
            prefix = f"mtp.{stage}."
            streams = self._sublayer(
                streams,
                f"{prefix}hc_attn",
                f"{prefix}attn_norm.weight",
                lambda x, p=prefix, s=stage: self._attention(
                    p, x, positions, context.keys[s], context.valid
                ),
            )
            streams = self._sublayer(
                streams,
                f"{prefix}hc_ffn",
                f"{prefix}ffn_norm.weight",
                lambda x, p=prefix: self._experts(p, x),
            )
        return self._collapse(streams)

    def base_logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """[.., V] logits before the Markov bias; lm_head: the target's [V, H]."""
        normed = self._norm(hidden, f"{self._last}norm.weight")
        return F.linear(normed, lm_head.to(self.dtype))

    def head(self) -> DraftHead:
        """Markov and confidence heads; the confidence reads the hidden states of `hidden`."""
        weights, last = self.weights, self._last
        confidence = weights.get(f"{last}confidence_head.proj.weight")
        bias = weights.get(f"{last}confidence_head.proj.bias")
        return DraftHead(
            markov=MarkovHead(
                kind="vanilla",
                w1=weights[f"{last}markov_head.markov_w1.weight"],
                w2=weights[f"{last}markov_head.markov_w2.weight"],
            ),
            confidence=None
            if confidence is None
            else ConfidenceHead(
                weight=confidence.view(-1),
                bias=None if bias is None else bias.view(()),
                with_markov=True,
            ),
        )

    def _norm(self, x: torch.Tensor, name: str | None) -> torch.Tensor:
        weight = None if name is None else self.weights[name]
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)

    def _mixes(self, streams: torch.Tensor, fn: str) -> torch.Tensor:
        return F.linear(self._norm(streams.flatten(-2), None), self.weights[fn])

    def _sublayer(self, streams, name: str, norm: str, function) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """One sub-layer inside its hyper-connection; streams: [R, Q, m, H]."""
        m, eps = self.spec.streams, self.spec.stream_eps
        mixes = self._mixes(streams, f"{name}_fn")
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        pre = torch.sigmoid(mixes[..., :m] * scale[0] + base[:m]) + eps
        post = POST_SCALE * torch.sigmoid(mixes[..., m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = self._sinkhorn(
            (mixes[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
        )
        out = function(self._norm((pre.unsqueeze(-1) * streams).sum(-2), norm))
        return post.unsqueeze(-1) * out.unsqueeze(-2) + comb.transpose(-1, -2) @ streams

    def _sinkhorn(self, logits: torch.Tensor) -> torch.Tensor:
        """Nearly doubly stochastic [.., m, m]: softmax over rows, then columns and rows in turn."""
        eps = self.spec.stream_eps
        comb = torch.softmax(logits, dim=-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.spec.sinkhorn_rounds - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb

    def _collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """[.., m, H] -> [.., H] by the learned head."""
        mixes = self._mixes(streams, f"{self._last}hc_head_fn")
        scale = self.weights[f"{self._last}hc_head_scale"]
        base = self.weights[f"{self._last}hc_head_base"]
        gates = torch.sigmoid(mixes * scale + base) + self.spec.stream_eps
        return (gates.unsqueeze(-1) * streams).sum(-2)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
        """RoPE on the last `rope_dim` entries, neighbouring pairs; sign -1 turns it back.

        x: [.., D] with as many leading axes as positions, or one more (heads).
        """
        dim = self.spec.rope_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device)
        frequency = self.spec.rope_theta ** (-steps / dim)
        angle = positions.to(torch.float64).unsqueeze(-1) * frequency * sign
        cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        if x.dim() > cos.dim():
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        plain, turned = x[..., :-dim], x[..., -dim:]
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return torch.cat([plain, pairs.flatten(-2)], dim=-1)

    def _keys(self, prefix: str, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[.., D] the one key, and value, of each token."""
        projected = F.linear(x, self.weights[f"{prefix}attn.wkv.weight"])
        return self._rotate(self._norm(projected, f"{prefix}attn.kv_norm.weight"), positions)

    def _attention(
        self,
        prefix: str,
        x: torch.Tensor,
        positions: torch.Tensor,
        # [R, W, D], [R, W]
        keys: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """[R, Q, H]; queries of a block see its context window and the whole block."""
        spec, weights = self.spec, self.weights
        low = self._norm(
            F.linear(x, weights[f"{prefix}attn.wq_a.weight"]), f"{prefix}attn.q_norm.weight"
        )
        query = F.linear(low, weights[f"{prefix}attn.wq_b.weight"])
        query = query.unflatten(-1, (spec.num_heads, spec.head_dim))
        query = self._rotate(self._norm(query, None), positions)
        seen = torch.cat([keys.to(self.dtype), self._keys(prefix, x, positions)], dim=1)
        scores = torch.einsum("rqhd,rkd->rqhk", query, seen) * spec.head_dim**-0.5
        block = valid.new_ones(valid.shape[0], x.shape[1])
        hidden = ~torch.cat([valid, block], dim=1)
        scores = scores.masked_fill(hidden[:, None, None], NEG_INF)
        sink = weights[f"{prefix}attn.attn_sink"].view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        shares = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        mixed = torch.einsum("rqhk,rkd->rqhd", shares, seen)
        # The values were rotated keys: turn the mixture back by the query's own position.
        mixed = self._rotate(mixed, positions, sign=-1.0)
        groups = mixed.flatten(-2).unflatten(-1, (spec.o_groups, -1))
        wide = weights[f"{prefix}attn.wo_a.weight"].unflatten(0, (spec.o_groups, spec.o_rank))
        narrow = torch.einsum("rqgi,goi->rqgo", groups, wide).flatten(-2)
        return F.linear(narrow, weights[f"{prefix}attn.wo_b.weight"])

    def _experts(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """Routed and shared experts; x: [R, Q, H]."""
        spec, weights = self.spec, self.weights
        flat = x.flatten(0, -2)
        scores = F.softplus(F.linear(flat, weights[f"{prefix}ffn.gate.weight"])).sqrt()
        ranked = scores + weights[f"{prefix}ffn.gate.bias"] if spec.has_gate_bias else scores
        chosen = ranked.topk(spec.active_experts, dim=-1).indices
        shares = scores.gather(-1, chosen)  # the bias chooses, it does not weigh
        shares = shares / shares.sum(-1, keepdim=True) * spec.routed_scale
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            rows, column = (chosen == expert).nonzero(as_tuple=True)
            result = self._swiglu(f"{prefix}ffn.experts.{expert}", flat[rows])
            out.index_add_(0, rows, result * shares[rows, column].unsqueeze(-1))
        if spec.shared_experts:
            out = out + self._swiglu(f"{prefix}ffn.shared_experts", flat)
        return out.view(x.shape)

    def _swiglu(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = F.linear(x, self.weights[f"{prefix}.w1.weight"])
        up = F.linear(x, self.weights[f"{prefix}.w3.weight"])
        limit = self.spec.swiglu_limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.linear(F.silu(gate) * up, self.weights[f"{prefix}.w2.weight"])
