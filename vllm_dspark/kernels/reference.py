"""Torch reference of drafting and rejection: the specification, readable beside the papers, slow.

Drafting (DSpark, DeepSeek 2026; the equations of the three heads as in deepseek-ai/DeepSpec,
deepspec/modeling/dspark/markov_head.py). For the columns k = 0..K-1 of a request, x_{-1} = anchor:

    e_k = W1[x_{k-1}]
    vanilla  y_k = e_k
    gated    y_k = sigmoid(G [h_k ; e_k] + g) * e_k
    rnn      [z ; c ; o] = J [s_{k-1} ; e_k ; h_k] + j,   s_{-1} = 0
             s_k = sigmoid(z) * s_{k-1} + (1 - sigmoid(z)) * tanh(c),   y_k = tanh(o)
    l_k = scale * (softcap(base_k) + W2 y_k)
    confidence logit_k = w . [h_k ; e_k] + b        (or w . h_k + b)

Temperature 0, or no logits cache: x_k = argmax l_k. Otherwise l_k is first rounded to the cache's
dtype and stored, then x_k = argmax(l_k / T + Gumbel(DRAFT)): what was drawn from is bit for bit
what rejection will divide by. Ties go to the lowest draft id; NaN counts as -inf. The argmax is a
draft id, x_k its target id.

Rejection (`_reject_standard`, `_reject_block`): p is the softmax of a target row, q that of the
cached draft row divided by the request's temperature, or one-hot at the draft without a cache.
A token is drawn from weights w as argmax(log w + Gumbel(RESAMPLE)).

Bad rows. NaN counts as -inf and +inf as the largest float32. A draft row without any finite logit
cannot have produced its draft, so the draft is rejected and p is sampled; a residual that rounds
to zero everywhere falls back to p; a target row without any finite logit accepts nothing and
yields token 0. No input makes an id outside 0..V-1.
"""

from itertools import pairwise

import torch

from vllm_dspark.kernels import noise
from vllm_dspark.kernels.protocols import (
    ConfidenceHead,
    DraftBatch,
    DraftHead,
    DraftOutput,
    MarkovHead,
    RejectBatch,
    RejectOutcome,
    RejectRule,
    SamplingState,
)

NEG_INF = float("-inf")
F32_MAX = torch.finfo(torch.float32).max


def finite_or_neg_inf(logits: torch.Tensor) -> torch.Tensor:
    """float32 logits where NaN is -inf and +inf is the largest finite number."""
    return torch.nan_to_num(logits.float(), nan=NEG_INF, posinf=F32_MAX, neginf=NEG_INF)


def target_ids(head: DraftHead, vocab: int, device: torch.device) -> torch.Tensor:
    """[V_d] target id of each draft id."""
    ids = torch.arange(vocab, device=device)
    return ids if head.d2t is None else ids + head.d2t


def markov_latent(
    markov: MarkovHead,
    # [R, r]
    embed: torch.Tensor,
    # [R, H]
    hidden: torch.Tensor,
    # [R, r]
    recurrent: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y_k, s_k) of the head; all tensors in one floating dtype."""
    if markov.kind == "vanilla":
        return embed, recurrent
    assert markov.proj_weight is not None, f"{markov.kind} head without its projection"
    parts = [hidden, embed] if markov.kind == "gated" else [recurrent, embed, hidden]
    projected = torch.cat(parts, dim=-1) @ markov.proj_weight.to(embed.dtype).T
    if markov.proj_bias is not None:
        projected = projected + markov.proj_bias.to(embed.dtype)
    if markov.kind == "gated":
        return torch.sigmoid(projected) * embed, recurrent
    gate, candidate, output = projected.chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * recurrent + (1 - gate) * torch.tanh(candidate)


def confidence_logit(
    confidence: ConfidenceHead,
    # [R, H]
    hidden: torch.Tensor,
    # [R, r], the plain embedding W1[x_{k-1}] whatever the Markov head's kind
    embed: torch.Tensor,
) -> torch.Tensor:
    """[R] float32 logit of the draft's acceptance."""
    x = torch.cat([hidden, embed], dim=-1) if confidence.with_markov else hidden
    logit = x @ confidence.weight.to(x.dtype)
    if confidence.bias is not None:
        logit = logit + confidence.bias.to(x.dtype)
    return logit.float()


class ReferenceDraftOps:
    """`DraftOps` as a literal transcription; `dtype` is the dtype of its arithmetic."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def sample_block(
        self, head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
    ) -> None:
        rows = (batch.req_index >= 0).nonzero().flatten()
        slots = batch.req_index[rows]
        temperature, seeds = state.temperature[slots], state.seeds[slots]
        vocab = batch.base_logits.shape[-1]
        ids = target_ids(head, vocab, batch.base_logits.device)
        hidden = batch.hidden[rows].to(self.dtype)
        prev = batch.anchor[rows]
        rank = head.markov.rank if head.markov else 0
        recurrent = torch.zeros(len(rows), rank, dtype=self.dtype, device=prev.device)
        for k in range(batch.base_logits.shape[1]):
            logits = batch.base_logits[rows, k].to(self.dtype)
            if head.soft_cap is not None:
                logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
            embed = hidden.new_zeros(len(rows), 0)
            if head.markov is not None:
                embed = head.markov.w1[prev].to(self.dtype)
                latent, recurrent = markov_latent(head.markov, embed, hidden[:, k], recurrent)
                logits = logits + latent @ head.markov.w2.to(self.dtype).T
            logits = finite_or_neg_inf(logits * head.logit_scale)

            if head.confidence is not None and out.confidence_logits is not None:
                out.confidence_logits[rows, k] = confidence_logit(
                    head.confidence, hidden[:, k], embed
                )

            drawn = logits.argmax(dim=-1)
            if out.logits_cache is not None:
                sampled = temperature > 0
                stored = logits.to(out.logits_cache.dtype)
                cache_slots = slots[sampled]
                out.logits_cache[cache_slots[:, None], k, ids[None, :]] = stored[sampled]
                gumbel = noise.gumbel_rows(seeds, batch.position[rows, k], k, noise.DRAFT, ids)
                scaled = stored.float() / torch.where(sampled, temperature, 1.0)[:, None]
                drawn = torch.where(sampled, (scaled + gumbel).argmax(dim=-1), drawn)
            prev = ids[drawn]
            out.tokens[rows, k] = prev


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """float64 softmax of one row [V]; all zero if no logit is finite."""
    logits = finite_or_neg_inf(logits).double()
    top = logits.max()
    if top == NEG_INF:
        return torch.zeros_like(logits)
    weights = torch.exp(logits - top)
    return weights / weights.sum()


def draw(weights: torch.Tensor, seed: torch.Tensor, pos: torch.Tensor, column: int) -> int:
    """Token drawn from unnormalised weights [V] with the RESAMPLE noise of (seed, pos, column)."""
    ids = torch.arange(len(weights), device=weights.device)
    gumbel = noise.gumbel_rows(seed[None], pos[None], column, noise.RESAMPLE, ids)[0]
    return int((torch.log(weights) + gumbel).argmax())


class ReferenceRejectOps:
    """`RejectOps` one request at a time."""

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        num_reqs = batch.cu_num_logits.shape[0] - 1
        device = batch.target_logits.device
        sampled = torch.full((num_reqs, rule.num_drafts + 1), -1, device=device)
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        verified = torch.zeros_like(num_sampled)
        bounds = batch.cu_num_logits.tolist()
        for r, (start, end) in enumerate(pairwise(bounds)):
            if start == end:
                continue
            window = _Window(batch, state, r, start, end)
            if window.temperature == 0:
                tokens = _reject_greedy(window, rule)
            elif rule.method == "block":
                tokens = _reject_block(window)
            else:
                tokens = _reject_standard(window, rule)
            sampled[r, : len(tokens)] = torch.tensor(tokens, device=device)
            num_sampled[r] = len(tokens)
            verified[r] = end - start - 1
        return RejectOutcome(sampled, num_sampled, (num_sampled - 1).clamp_min(0), verified)


class _Window:
    """One request's rows, with p, q, draft and noise of each column."""

    def __init__(
        self, batch: RejectBatch, state: SamplingState, r: int, start: int, end: int
    ) -> None:
        self.slot = int(batch.idx_mapping[r])
        self.temperature = float(state.temperature[self.slot])
        self.seed = state.seeds[self.slot]
        self.num_drafts = end - start - 1
        self.logits = batch.target_logits[start:end]
        self.pos = batch.pos[start:end]
        self.drafts: list[int] = batch.draft_tokens[start + 1 : end].tolist()
        self.draft_logits = None if batch.draft_logits is None else batch.draft_logits[self.slot]

    def p(self, column: int) -> torch.Tensor:
        return probabilities(self.logits[column])

    def q(self, column: int) -> torch.Tensor:
        """Draft distribution over 0..V-1; it may sum to less than 1 if V_c > V."""
        vocab = self.logits.shape[1]
        q = torch.zeros(vocab, dtype=torch.float64, device=self.logits.device)
        if self.draft_logits is None:
            q[self.drafts[column]] = 1.0
        else:
            cached = probabilities(self.draft_logits[column].float() / self.temperature)[:vocab]
            q[: len(cached)] = cached
        return q

    def judgeable(self, column: int) -> bool:
        """Whether the draft is a target id and its draft row is a distribution."""
        in_vocab = 0 <= self.drafts[column] < self.logits.shape[1]
        return in_vocab and bool(self.q(column).any())

    def u(self, column: int) -> float:
        return float(noise.accept_uniform(self.seed, self.pos[column], column))

    def draw(self, weights: torch.Tensor, column: int) -> int:
        if not weights.any():
            weights = self.p(column)
        return draw(weights, self.seed, self.pos[column], column)


def _reject_greedy(window: _Window, rule: RejectRule) -> list[int]:
    """Temperature 0: accept while the draft is the target's argmax, then the argmax."""
    argmax: list[int] = finite_or_neg_inf(window.logits).argmax(dim=-1).tolist()
    valid = (finite_or_neg_inf(window.logits) > NEG_INF).any(dim=-1).tolist()
    for i, x in enumerate(window.drafts):
        accept = x == argmax[i] and valid[i]
        if rule.synthetic_rates is not None:
            accept = window.u(i) < float(rule.synthetic_rates[i]) and 0 <= x < len(window.logits[i])
        if not accept:
            return [*window.drafts[:i], argmax[i]]
    return [*window.drafts, argmax[-1]]


def _reject_standard(window: _Window, rule: RejectRule) -> list[int]:
    """Leviathan et al. 2023, algorithm 1: accept x with probability min(1, p(x) / q(x))."""
    for i, x in enumerate(window.drafts):
        if not window.judgeable(i):
            return [*window.drafts[:i], window.draw(window.p(i), i)]
        p, q = window.p(i), window.q(i)
        accept = window.u(i) * float(q[x]) < float(p[x])
        if rule.synthetic_rates is not None:
            accept = window.u(i) < float(rule.synthetic_rates[i])
        if not accept:
            return [*window.drafts[:i], window.draw((p - q).clamp_min(0), i)]
    return [*window.drafts, window.draw(window.p(window.num_drafts), window.num_drafts)]


def _clipped_ratio(p: float, q: float) -> float:
    """min(1, p / q), with 0 / 0 = 0."""
    if p >= q:
        return 1.0 if p > 0 else 0.0
    return p / q


def _reject_block(window: _Window) -> list[int]:
    """Sun et al. 2024, algorithm 2: the longest prefix whose joint test passes.

    ratio_0 = 1, ratio_i = min(1, ratio_{i-1} * p_{i-1}(x_{i-1}) / q_{i-1}(x_{i-1}))
    mass_i  = sum(max(ratio_i * p_i - q_i, 0))
    h_i     = mass_i / (mass_i + 1 - ratio_i) inside the block, ratio_i at its end
    The accepted length is the largest i >= 1 with u_{i-1} <= h_i, else 0; the token after it comes
    from max(ratio_i * p_i - q_i, 0), or from p at the end of the window. The block ends before the
    first draft that cannot be judged, where p is sampled.
    """
    length = 0
    while length < window.num_drafts and window.judgeable(length):
        length += 1
    accepted, accepted_ratio, ratio = 0, 1.0, 1.0
    for i in range(1, length + 1):
        p, q, x = window.p(i - 1), window.q(i - 1), window.drafts[i - 1]
        ratio = _clipped_ratio(ratio * float(p[x]), float(q[x]))
        h = ratio
        if i < length:
            mass = float((ratio * window.p(i) - window.q(i)).clamp_min(0).sum())
            rest = mass + 1.0 - ratio
            h = mass / rest if rest > 0 else 1.0
        if window.u(i - 1) <= h:
            accepted, accepted_ratio = i, ratio
    weights = window.p(accepted)
    if accepted < length:
        weights = (accepted_ratio * weights - window.q(accepted)).clamp_min(0)
    return [*window.drafts[:accepted], window.draw(weights, accepted)]
