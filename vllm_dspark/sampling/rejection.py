"""Vectorised torch verification (`RejectOps`): any device, fixed shapes, no host synchronisation.

Works on all N rows at once, so it moves a few [N, V] float32 tensors: the portable path where no
fused kernel serves, and the check of those on a GPU. Semantics: `kernels/reference.py`.
"""

from dataclasses import dataclass

import torch

from vllm_dspark.errors import DSparkError
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.protocols import (
    RejectBatch,
    RejectOutcome,
    RejectRule,
    SamplingState,
)
from vllm_dspark.kernels.reference import F32_MAX, finite_or_neg_inf


@dataclass(frozen=True)
class _Rows:
    """Where each row belongs; rows past the last window belong to none and are ignored."""

    # [N] window of the row, its place in it, whether it judges a draft, that draft
    window: torch.Tensor
    column: torch.Tensor
    judges: torch.Tensor
    draft: torch.Tensor
    # [N] request slot, its seed and temperature (0 on rows of no window)
    slot: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor


class TorchRejectOps:
    """`RejectOps` in plain torch."""

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        if rule.synthetic_rates is not None and rule.method == "block":
            raise DSparkError("synthetic acceptance rates need method 'standard', not 'block'")
        bounds = batch.cu_num_logits.long()
        num_drafts = (bounds.diff() - 1).clamp_min(0)
        nonempty = bounds.diff() > 0
        if batch.target_logits.shape[0] == 0:
            return _outcome(batch, rule, num_drafts, nonempty, num_drafts * 0, num_drafts * 0)
        rows = _locate(batch, state, bounds)
        logits = finite_or_neg_inf(batch.target_logits)
        argmax = logits.argmax(dim=-1)
        p = _softmax(logits)
        q = _draft_probabilities(batch, rows)
        judgeable = rows.judges & (rows.draft >= 0) & (rows.draft < p.shape[1])
        if batch.draft_logits is not None:
            judgeable &= (q > 0).any(dim=-1) | (rows.temperature == 0)

        passed, ratio = _standard_test(batch, rows, rule, p, q, argmax, judgeable)
        accepted = _first_failure(rows, passed, num_drafts)
        if rule.method == "block":
            joint, ratio = _block_test(batch, rows, rule, p, q, judgeable, bounds)
            greedy = state.temperature[batch.idx_mapping.long().clamp_min(0)] == 0
            accepted = torch.where(greedy, accepted, joint)

        final = (bounds[:-1] + accepted).clamp_max(logits.shape[0] - 1)
        drawn = _draw(batch, rows, final, logits, p, q, ratio, judgeable)
        drawn = torch.where(rows.temperature[final] == 0, argmax[final], drawn)
        return _outcome(batch, rule, num_drafts, nonempty, accepted, drawn)


def _locate(batch: RejectBatch, state: SamplingState, bounds: torch.Tensor) -> _Rows:
    num_rows = batch.target_logits.shape[0]
    index = torch.arange(num_rows, device=bounds.device)
    owner = torch.bucketize(index, bounds[1:], right=True)
    owned = owner < bounds.shape[0] - 1
    window = owner.clamp_max(bounds.shape[0] - 2)
    column = torch.where(owned, index - bounds[window], 0)
    judges = owned & (index + 1 < bounds[window + 1])
    draft = torch.where(judges, batch.draft_tokens[(index + 1) % num_rows].long(), -1)
    slot = torch.where(owned, batch.idx_mapping.long()[window], 0).clamp_min(0)
    temperature = torch.where(owned, state.temperature[slot], 0.0)
    return _Rows(window, column, judges, draft, slot, state.seeds[slot], temperature)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax of clean logits; all zero where none is finite."""
    return torch.nan_to_num(torch.softmax(logits, dim=-1), nan=0.0)


def _draft_probabilities(batch: RejectBatch, rows: _Rows) -> torch.Tensor:
    """[N, V] q of each judging row, zero elsewhere and on rows at temperature 0."""
    num_rows, vocab = batch.target_logits.shape
    q = torch.zeros(num_rows, vocab, device=rows.slot.device)
    if batch.draft_logits is None:
        hot = rows.judges & (rows.draft >= 0) & (rows.draft < vocab)
        return q.scatter_(1, rows.draft.clamp(0, vocab - 1)[:, None], hot[:, None].float())
    width = batch.draft_logits.shape[1]
    cached = batch.draft_logits[rows.slot, rows.column.clamp_max(width - 1)].float()
    live = rows.judges & (rows.temperature > 0)
    heat = torch.where(live, rows.temperature, 1.0)
    shared = min(vocab, cached.shape[1])
    probs = _softmax(finite_or_neg_inf(cached / heat[:, None]))
    q[:, :shared] = torch.where(live[:, None], probs[:, :shared], 0.0)
    return q


def _at(probs: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """[N] probs[i, token[i]], for any token value."""
    return probs.gather(1, token.clamp(0, probs.shape[1] - 1)[:, None])[:, 0]


def _standard_test(
    batch: RejectBatch,
    rows: _Rows,
    rule: RejectRule,
    p: torch.Tensor,
    q: torch.Tensor,
    argmax: torch.Tensor,
    judgeable: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] whether the row's draft passes on its own, [N] factor 1 on p in the residual)."""
    u = noise.accept_uniform(rows.seed, batch.pos.long(), rows.column)
    if rule.synthetic_rates is not None:
        last = rule.synthetic_rates.shape[0] - 1
        passed = u < rule.synthetic_rates.float()[rows.column.clamp_max(last)]
    else:
        sampled = u.double() * _at(q, rows.draft).double() < _at(p, rows.draft).double()
        greedy = (rows.draft == argmax) & (p > 0).any(dim=-1)
        passed = torch.where(rows.temperature == 0, greedy, sampled)
    return passed & judgeable, torch.ones_like(u)


def _first_failure(rows: _Rows, passed: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """[R] column of each window's first draft that did not pass, its draft count if all did."""
    failed_at = torch.where(rows.judges & ~passed, rows.column, num_drafts[rows.window])
    return num_drafts.scatter_reduce(0, rows.window, failed_at, "amin", include_self=True)


def _block_test(
    batch: RejectBatch,
    rows: _Rows,
    rule: RejectRule,
    p: torch.Tensor,
    q: torch.Tensor,
    judgeable: torch.Tensor,
    bounds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R] accepted length, [N] joint ratio before each row); see reference._reject_block."""
    last_row = p.shape[0] - 1
    u = noise.accept_uniform(rows.seed, batch.pos.long(), rows.column).double()
    p_x, q_x = _at(p, rows.draft).double(), _at(q, rows.draft).double()
    length = _first_failure(rows, judgeable, (bounds.diff() - 1).clamp_min(0))
    ratio = torch.ones_like(bounds[:-1], dtype=torch.float64)
    accepted = torch.zeros_like(bounds[:-1])
    row_ratio = torch.ones_like(u)
    for i in range(1, rule.num_drafts + 1):
        inside = i <= length
        before = (bounds[:-1] + i - 1).clamp_max(last_row)
        here = (bounds[:-1] + i).clamp_max(last_row)
        joint = ratio * p_x[before]
        clipped = torch.where(joint >= q_x[before], (joint > 0).double(), joint / q_x[before])
        ratio = torch.where(inside, clipped, ratio)
        mass = (ratio[:, None] * p[here] - q[here]).clamp_min(0).sum(dim=-1)
        rest = mass + 1.0 - ratio
        h = torch.where(i < length, torch.where(rest > 0, mass / rest, 1.0), ratio)
        accepted = torch.where(inside & (u[before] <= h), i, accepted)
        # Windows that end before row i write their unchanged ratio to a row nobody reads.
        row_ratio = torch.where(
            (rows.column == i) & inside[rows.window], ratio[rows.window], row_ratio
        )
    return accepted, row_ratio


def _draw(
    batch: RejectBatch,
    rows: _Rows,
    # [R] the row whose distribution the token after the accepted drafts comes from
    final: torch.Tensor,
    logits: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    ratio: torch.Tensor,
    judgeable: torch.Tensor,
) -> torch.Tensor:
    """[R] token drawn from the residual, or from p where there is no judged draft."""
    residual = (ratio[final][:, None] * p[final].double() - q[final]).clamp_min(0)
    use_residual = judgeable[final] & (residual.sum(dim=-1) > 0)
    # Relative to the top, so that the noise is not lost beside large logits
    relative = logits[final] - logits[final].max(dim=-1, keepdim=True).values.clamp_min(-F32_MAX)
    scores = torch.where(use_residual[:, None], residual.log().float(), relative)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    gumbel = noise.gumbel_rows(
        rows.seed[final], batch.pos.long()[final], rows.column[final], noise.RESAMPLE, tokens
    )
    return (scores + gumbel).argmax(dim=-1)


def _outcome(
    batch: RejectBatch,
    rule: RejectRule,
    num_drafts: torch.Tensor,
    nonempty: torch.Tensor,
    accepted: torch.Tensor,
    drawn: torch.Tensor,
) -> RejectOutcome:
    columns = torch.arange(rule.num_drafts + 1, device=accepted.device)
    sampled = torch.full(
        (accepted.shape[0], rule.num_drafts + 1), -1, dtype=torch.int64, device=accepted.device
    )
    num_rows = batch.draft_tokens.shape[0]
    if num_rows:
        source = batch.cu_num_logits.long()[:-1, None] + 1 + columns
        drafts = batch.draft_tokens.long()[source.clamp_max(num_rows - 1)]
        sampled = torch.where(columns < accepted[:, None], drafts, sampled)
        sampled = torch.where(columns == accepted[:, None], drawn[:, None], sampled)
        sampled = torch.where(nonempty[:, None], sampled, -1)
    accepted = torch.where(nonempty, accepted, 0).to(torch.int32)
    return RejectOutcome(
        sampled, accepted + nonempty.to(torch.int32), accepted, num_drafts.to(torch.int32)
    )
