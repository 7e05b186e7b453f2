"""A whole drafter in torch float64, dense and uncached, written from the paper and the formats.

Everything is recomputed for one request from the target's hidden states: no cache, no batch, no
slots. It shares no code with the package but the parsed spec.
"""

import torch
import torch.nn.functional as F


def rms(x, eps, weight=None):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x, positions, frequency, scale=1.0):
    """Halves rotate against each other; x: [n, heads, d], frequency: [d / 2] radians a token.

    scale: factor on queries and keys (YaRN's).
    """
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * frequency
    cos, sin = scale * angle.cos()[:, None], scale * angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class ReferenceDrafter:
    """tensors: the checkpoint's, target's embedding and head filled in where they are shared.

    frequency, rope_scale: of rotary embeddings that are not plain powers of theta.
    """

    def __init__(self, spec, tensors, *, theta, eps, gemma=False, frequency=None, rope_scale=1.0):
        self.spec, self.eps, self.gemma = spec, eps, gemma
        half = spec.head_dim // 2
        plain = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        self.frequency = plain if frequency is None else frequency.double()
        self.rope_scale = rope_scale
        self.w = {name: t.double() for name, t in tensors.items() if name != "d2t"}
        self.d2t = tensors.get("d2t")

    def draft(self, aux, anchor, num_drafts):
        """(tokens, confidence logits) after the context `aux` [T, L * H_target].

        anchor: the token at position T; greedy.
        """
        hidden = self.block_hidden(aux, anchor, num_drafts)
        return self.sequential(hidden, anchor)

    def block_hidden(self, aux, anchor, num_drafts):
        """[K, H] hidden states that predict the drafts."""
        spec, w = self.spec, self.w
        queries = num_drafts if spec.sample_from_anchor else 1 + num_drafts
        ids = [anchor] + [spec.mask_token_id] * (queries - 1)
        x = w["embed_tokens.weight"][torch.tensor(ids)]
        if self.gemma:
            x = x * spec.hidden_size**0.5
        length = len(aux)
        places = torch.arange(length + queries)
        context = rms(aux.double() @ w["fc.weight"].T, self.eps, w["hidden_norm.weight"])
        for layer in range(spec.num_layers):
            x = self.layer(layer, x, context, places)
        x = rms(x, self.eps, w["norm.weight"])
        return x if spec.sample_from_anchor else x[1:]

    def layer(self, index, x, context, places):
        w, p = self.w, f"layers.{index}."
        out = self.attention(
            index, rms(x, self.eps, w[f"{p}input_layernorm.weight"]), context, places
        )
        if not self.gemma:
            x = x + out
            inner = rms(x, self.eps, w[f"{p}post_attention_layernorm.weight"])
            gate, up = (
                inner @ w[f"{p}mlp.gate_proj.weight"].T,
                inner @ w[f"{p}mlp.up_proj.weight"].T,
            )
            return x + (F.silu(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T
        x = x + rms(out, self.eps, w[f"{p}post_attention_layernorm.weight"])
        inner = rms(x, self.eps, w[f"{p}pre_feedforward_layernorm.weight"])
        out = self.mlp(p, inner, lambda gate: F.gelu(gate, approximate="tanh"))
        x = x + rms(out, self.eps, w[f"{p}post_feedforward_layernorm.weight"])
        return x * w[f"{p}layer_scalar"]

    def mlp(self, prefix, x, activation):
        gate = x @ self.w[f"{prefix}mlp.gate_proj.weight"].T
        up = x @ self.w[f"{prefix}mlp.up_proj.weight"].T
        return (activation(gate) * up) @ self.w[f"{prefix}mlp.down_proj.weight"].T

    def attention(self, index, x, context, places):
        spec, w, p = self.spec, self.w, f"layers.{index}.self_attn."
        before = len(context)

        def heads(states, name, count):
            flat = states @ w[f"{p}{name}.weight"].T + w.get(f"{p}{name}.bias", 0.0)
            return flat.view(len(states), count, spec.head_dim)

        everything = torch.cat([context, x])
        query = rms(heads(x, "q_proj", spec.num_heads), self.eps, w[f"{p}q_norm.weight"])
        raw = heads(everything, "k_proj", spec.num_kv_heads)
        key = rms(raw, self.eps, w[f"{p}k_norm.weight"])
        if spec.values_are_keys:
            value = rms(raw, self.eps)
        else:
            value = heads(everything, "v_proj", spec.num_kv_heads)
            value = rms(value, self.eps) if self.gemma else value
        query = rope(query, places[before:], self.frequency, self.rope_scale)
        key = rope(key, places, self.frequency, self.rope_scale)
        groups = spec.num_heads // spec.num_kv_heads
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scale = 1.0 if self.gemma else spec.head_dim**-0.5
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        scores = scores.masked_fill(~self.visible(index, before, len(x)), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return mixed.flatten(1) @ w[f"{p}o_proj.weight"].T + w.get(f"{p}o_proj.bias", 0.0)

    def visible(self, index, before, queries):
        """[Q, T + Q] what each query of a block may see in this layer."""
        span = self.spec.sliding_windows[index]
        own = before + torch.arange(queries)[:, None]
        other = torch.arange(before + queries)[None]
        if span is None:
            return torch.ones(queries, before + queries, dtype=torch.bool)
        near = other > own - span
        return near if self.spec.sliding_non_causal else near & (other <= own)

    def sequential(self, hidden, anchor):
        spec, w = self.spec, self.w
        prev, tokens, confidences = anchor, [], []
        state = torch.zeros(spec.markov_rank, dtype=torch.float64)
        for h in hidden:
            base = w["lm_head.weight"] @ h
            if spec.soft_cap is not None:
                base = spec.soft_cap * torch.tanh(base / spec.soft_cap)
            e = torch.zeros(0, dtype=torch.float64)
            if spec.markov_kind is not None:
                e = w["markov_head.markov_w1.weight"][prev]
                y, state = self.latent(e, h, state)
                base = base + w["markov_head.markov_w2.weight"] @ y
            if spec.has_confidence:
                x = torch.cat([h, e]) if spec.confidence_with_markov else h
                score = w["confidence_head.proj.weight"][0] @ x
                confidences.append(float(score + w["confidence_head.proj.bias"][0]))
            draft = int(base.argmax())
            prev = draft if self.d2t is None else draft + int(self.d2t[draft])
            tokens.append(prev)
        return tokens, confidences

    def latent(self, e, h, state):
        """(what markov_w2 reads, recurrent state)."""
        w, kind, r = self.w, self.spec.markov_kind, self.spec.markov_rank
        if kind == "vanilla":
            return e, state
        if kind == "gated":
            raw = w["markov_head.gate_proj.weight"] @ torch.cat([h, e])
            return torch.sigmoid(raw + w["markov_head.gate_proj.bias"]) * e, state
        raw = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
        raw = raw + w["markov_head.joint_proj.bias"]
        gate = torch.sigmoid(raw[:r])
        state = gate * state + (1 - gate) * torch.tanh(raw[r : 2 * r])
        return torch.tanh(raw[2 * r :]), state


class ReferenceTarget:
    """Hidden states of a transformers model in float64."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        decoder = self.model.model
        self.layers = decoder.layers
        self.embed = self.model.get_input_embeddings()

    def aux(self, tokens, layer_ids):
        """[T, L * H]: outputs of the layers named, -1 the embedding's, before the final norm."""
        outputs = {}

        def keep(index):
            def hook(_module, _inputs, output):
                value = output[0] if isinstance(output, tuple) else output
                outputs[index] = value[0] if value.dim() == 3 else value

            return hook

        hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(self.layers)]
        hooks.append(self.embed.register_forward_hook(keep(-1)))
        try:
            with torch.no_grad():
                self.model(torch.tensor([tokens]))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([outputs[i].detach() for i in layer_ids], dim=-1)
