"""Training batches: padded sequences and the blocks drawn in them, all on the training device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from examples.train_drafter.config import Bucket
from examples.train_drafter.generate import Dataset

# Every such row is kept for validation (never trained on), so that settings can be compared.
VALIDATION_EVERY = 64


@dataclass
class Batch:
    """tokens [S, T] right-padded with 0, anchors [S, A], ends [S] (length of each sequence)."""

    tokens: Tensor
    anchors: Tensor
    ends: Tensor

    def slots(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every block slot: positions of the token before it [S, A*K], labels, valid."""
        steps = torch.arange(size, device=self.anchors.device)
        before = (self.anchors[:, :, None] + steps).flatten(1)
        valid = before + 1 < self.ends[:, None]
        last = self.tokens.shape[1] - 1
        labels = self.tokens.gather(1, (before + 1).clamp_max(last))
        return before.clamp_max(last), labels, valid


class BatchSampler:
    """Draws batches so that every response token is equally likely to be an anchor."""

    def __init__(
        self,
        data: Dataset,
        buckets: tuple[Bucket, ...],
        device: torch.device,
        seed: int,
        validation: bool = False,
    ) -> None:
        self.buckets, self.device = buckets, device
        self.flat = torch.from_numpy(data.tokens.astype(np.int32)).to(device)
        self.offsets = data.offsets[:-1]
        self.lengths = np.diff(data.offsets)
        self.prompt_lengths = data.prompt_lengths.astype(np.int64)
        # An anchor needs a response token and one more to predict.
        places = np.maximum(self.lengths - self.prompt_lengths - 1, 0)
        wanted = (np.arange(len(places)) % VALIDATION_EVERY == 0) == validation
        self.rng = np.random.default_rng(seed)
        self.members: list[np.ndarray] = []
        self.cumulative: list[np.ndarray] = []
        lower = 0
        for bucket in buckets:
            inside = (self.lengths > lower) & (self.lengths <= bucket.length)
            rows = np.flatnonzero(inside & wanted & (places > 0))
            self.members.append(rows)
            self.cumulative.append(np.cumsum(places[rows], dtype=np.float64))
            lower = bucket.length
        totals = np.asarray([c[-1] if len(c) else 0.0 for c in self.cumulative])
        if not totals.sum():
            raise ValueError("no sequence fits any bucket")
        self.odds = totals / totals.sum()

    def next(self) -> Batch:
        """One batch of a bucket drawn by its number of response tokens."""
        which = int(self.rng.choice(len(self.buckets), p=self.odds))
        bucket, cumulative = self.buckets[which], self.cumulative[which]
        drawn = self.rng.random(bucket.rows) * cumulative[-1]
        rows = self.members[which][np.searchsorted(cumulative, drawn, side="right")]
        prompt, length = self.prompt_lengths[rows], self.lengths[rows]
        # Stratified: one anchor in each of `anchors` equal parts of the response.
        part = np.arange(bucket.anchors) + self.rng.random((bucket.rows, bucket.anchors))
        places = (length - prompt - 1)[:, None]
        offset = np.minimum((part / bucket.anchors * places).astype(np.int64), places - 1)
        starts = torch.from_numpy(self.offsets[rows]).to(self.device)
        ends = torch.from_numpy(length).to(self.device)
        columns = torch.arange(bucket.length, device=self.device)
        at = (starts[:, None] + columns).clamp_max(len(self.flat) - 1)
        tokens = torch.where(columns < ends[:, None], self.flat[at], 0).long()
        anchors = torch.from_numpy(prompt[:, None] + offset).to(self.device)
        return Batch(tokens, anchors, ends)
