"""The embedded drafter once more, in numpy float64, one token at a time, from the equations.

Written for reading, not for speed, and without any code of the package: loops over requests,
queries, heads, streams and experts stand where the implementation has tensor operations.
"""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, eps, weight=None):
    normed = x / np.sqrt(np.mean(x * x) + eps)
    return normed if weight is None else normed * weight


def rotated(x, position, spec, direction=1):
    """Neighbouring pairs of the last rope_dim entries turn by position * theta^(-2i/d)."""
    x, start = x.copy(), len(x) - spec.rope_dim
    for i in range(spec.rope_dim // 2):
        angle = direction * position * spec.rope_theta ** (-2 * i / spec.rope_dim)
        a, b = x[start + 2 * i], x[start + 2 * i + 1]
        x[start + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
        x[start + 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return x


def swiglu(w, prefix, x, limit):
    gate, up = w[f"{prefix}.w1.weight"] @ x, w[f"{prefix}.w3.weight"] @ x
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return w[f"{prefix}.w2.weight"] @ (gate * sigmoid(gate) * up)


def experts(w, prefix, x, spec):
    scores = np.sqrt(np.log1p(np.exp(w[f"{prefix}ffn.gate.weight"] @ x)))
    order = np.argsort(-(scores + w[f"{prefix}ffn.gate.bias"]))[: spec.active_experts]
    total = scores[order].sum()
    out = np.zeros_like(x)
    for e in order:
        share = scores[e] / total * spec.routed_scale
        out += share * swiglu(w, f"{prefix}ffn.experts.{e}", x, spec.swiglu_limit)
    return out + swiglu(w, f"{prefix}ffn.shared_experts", x, spec.swiglu_limit)


def key(w, prefix, x, position, spec):
    projected = w[f"{prefix}attn.wkv.weight"] @ x
    return rotated(rms(projected, spec.norm_eps, w[f"{prefix}attn.kv_norm.weight"]), position, spec)


def attention(w, prefix, x, position, seen, spec):
    """One query; seen: the keys it may attend to."""
    low = rms(w[f"{prefix}attn.wq_a.weight"] @ x, spec.norm_eps, w[f"{prefix}attn.q_norm.weight"])
    wide = (w[f"{prefix}attn.wq_b.weight"] @ low).reshape(spec.num_heads, spec.head_dim)
    heads = []
    for h in range(spec.num_heads):
        q = rotated(rms(wide[h], spec.norm_eps), position, spec)
        weights = [math.exp(q @ k / math.sqrt(spec.head_dim)) for k in seen]
        total = sum(weights) + math.exp(w[f"{prefix}attn.attn_sink"][h])
        mixed = sum(share * k for share, k in zip(weights, seen, strict=True)) / total
        heads.append(rotated(mixed, position, spec, direction=-1))
    per_group = spec.num_heads // spec.o_groups
    narrow = []
    for g in range(spec.o_groups):
        rows = slice(g * spec.o_rank, (g + 1) * spec.o_rank)
        inputs = np.concatenate(heads[g * per_group : (g + 1) * per_group])
        narrow.append(w[f"{prefix}attn.wo_a.weight"][rows] @ inputs)
    return w[f"{prefix}attn.wo_b.weight"] @ np.concatenate(narrow)


def gates(w, name, streams, spec):
    """(pre [m], post [m], comb [m, m]) of one token."""
    m, eps = spec.streams, spec.stream_eps
    u = w[f"{name}_fn"] @ rms(streams.reshape(-1), spec.norm_eps)
    scale, base = w[f"{name}_scale"], w[f"{name}_base"]
    pre = sigmoid(u[:m] * scale[0] + base[:m]) + eps
    post = 2 * sigmoid(u[m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = np.exp((u[2 * m :] * scale[2] + base[2 * m :]).reshape(m, m))
    comb = comb / comb.sum(1, keepdims=True) + eps
    comb = comb / (comb.sum(0, keepdims=True) + eps)
    for _ in range(spec.sinkhorn_rounds - 1):
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        comb = comb / (comb.sum(0, keepdims=True) + eps)
    return pre, post, comb


def connect(w, name, norm, streams, spec, functions):
    """One sub-layer of every query: functions(inputs) -> outputs, all tokens at once."""
    mixes = [gates(w, name, s, spec) for s in streams]
    inputs = [
        rms(sum(pre[i] * s[i] for i in range(spec.streams)), spec.norm_eps, w[norm])
        for s, (pre, _, _) in zip(streams, mixes, strict=True)
    ]
    outputs = functions(inputs)
    return [
        np.stack(
            [
                post[j] * out + sum(comb[i, j] * s[i] for i in range(spec.streams))
                for j in range(spec.streams)
            ]
        )
        for s, out, (_, post, comb) in zip(streams, outputs, mixes, strict=True)
    ]


def block_hidden(w, spec, embeds, positions, main, main_positions):
    """[Q, H] head hidden states of one request's block.

    embeds [Q, H], positions [Q]; main [T, H] and main_positions [T]: its whole context.
    """
    window = range(max(0, len(main) - spec.window), len(main))
    streams = [np.stack([e] * spec.streams) for e in embeds]
    for stage in range(spec.num_stages):
        p = f"mtp.{stage}."

        def attend(inputs, p=p):
            context = [key(w, p, main[t], main_positions[t], spec) for t in window]
            block = [key(w, p, x, n, spec) for x, n in zip(inputs, positions, strict=True)]
            return [
                attention(w, p, x, n, context + block, spec)
                for x, n in zip(inputs, positions, strict=True)
            ]

        streams = connect(w, f"{p}hc_attn", f"{p}attn_norm.weight", streams, spec, attend)
        streams = connect(
            w,
            f"{p}hc_ffn",
            f"{p}ffn_norm.weight",
            streams,
            spec,
            lambda inputs, p=p: [experts(w, p, x, spec) for x in inputs],
        )
    last = f"mtp.{spec.num_stages - 1}."
    out = []
    for s in streams:
        u = w[f"{last}hc_head_fn"] @ rms(s.reshape(-1), spec.norm_eps)
        gate = sigmoid(u * w[f"{last}hc_head_scale"] + w[f"{last}hc_head_base"]) + spec.stream_eps
        out.append(sum(gate[i] * s[i] for i in range(spec.streams)))
    return np.stack(out)


def main_states(w, spec, aux):
    """[T, H] of the concatenated hidden states [T, L * H]."""
    return np.stack(
        [
            rms(w["mtp.0.main_proj.weight"] @ a, spec.norm_eps, w["mtp.0.main_norm.weight"])
            for a in aux
        ]
    )


def draft(w, spec, hidden, lm_head, anchor):
    """(tokens, confidence logits) of one block, drawn greedily from left to right."""
    last = f"mtp.{spec.num_stages - 1}."
    w1 = w[f"{last}markov_head.markov_w1.weight"]
    w2 = w[f"{last}markov_head.markov_w2.weight"]
    scorer = w[f"{last}confidence_head.proj.weight"][0]
    prev, tokens, confidences = anchor, [], []
    for h in hidden:
        logits = lm_head @ rms(h, spec.norm_eps, w[f"{last}norm.weight"]) + w2 @ w1[prev]
        confidences.append(float(scorer @ np.concatenate([h, w1[prev]])))
        prev = int(np.argmax(logits))
        tokens.append(prev)
    return tokens, confidences
