"""Recorded confidences and acceptance in place of an engine's own: a benchmark's test facility.

A pair with random weights runs at the speed of its shape, but accepts nothing and says nothing of
it. With a replay the engine works as ever (target, drafter, head, rejection at their full cost) and
two figures of each draft block are taken from a recording of a real pair: the confidences that the
drafter is said to have given, and the number of leading drafts that are accepted. Both come from
the same recorded step, so their joint law is the recorded one, whatever windows are chosen:

    accepted = min(recorded accepted, drafts verified)

Stock engines and ours are treated alike. vLLM's own synthetic rejection with rates of 1 accepts
every valid draft; drafts beyond the recorded length are marked invalid, as a grammar would mark
them, before the engine's own rejection kernels run. Confidences are written where the engine
itself keeps them, right after the draft pass.

Which recorded request is repeated stands in the id of every request (`request_mark`), so that all
ranks of an engine know it, in whatever process they are, without being told request by request.

Tokens of a replayed engine mean nothing. There is no option that turns this on: only
`vllm-dspark bench --replay` installs it, on an engine that it has started for that.
"""

from __future__ import annotations

import logging
import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_dspark.errors import EngineError

logger = logging.getLogger("vllm.vllm_dspark")

_LEAST, _MOST = 1e-7, 1.0 - 1e-7  # confidences whose logits float32 can hold
# Within an id: vLLM appends a random suffix to the ids that it is given, and its server a prefix.
_MARK = re.compile(r"-replay-([gs])([0-9a-f]{8})(?:-|$)")


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """R requests with P steps in all; steps of a request stand together, in order.

    first: [R + 1] int64 first step of each; confidence: [P, K] float32; accepted: [P] drafts that
    the target takes if all K are verified; sampled: [R] whether the request had a temperature.
    """

    first: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]

    @property
    def width(self) -> int:
        """K of the recording."""
        return int(self.confidence.shape[1])

    def successors(self) -> npt.NDArray[np.int64]:
        """[P] the step after each; after a request's last step its first."""
        following = np.arange(1, len(self.accepted) + 1, dtype=np.int64)
        following[self.first[1:] - 1] = self.first[:-1]
        return following


def request_mark(key: str, *, sampled: bool) -> str:
    """What a request's id must hold, after a name of its own, to be replayed.

    key: decides which recorded request it repeats; the same in all modes that are compared.
    sampled: whether it has a temperature; greedy requests repeat greedy ones.
    """
    return f"-replay-{'s' if sampled else 'g'}{zlib.crc32(key.encode()):08x}"


class TraceReplay:
    """Which recorded step each request of a running engine is at."""

    def __init__(self, runner: Any, steps: RecordedSteps) -> None:
        """Raises EngineError where the recording does not fit the engine."""
        width, device = runner.num_speculative_steps, runner.device
        if steps.width < width:
            raise EngineError(
                f"a recording of {steps.width} drafts cannot be replayed with "
                f"num_speculative_tokens = {width}; record with at least as many"
            )
        if np.isnan(steps.confidence).any():
            raise EngineError("the recording holds confidences that are NaN; record it again")
        self._last_of = steps.first[1:] - 1  # [R]; its successor is the request's first step
        self._classes = [np.flatnonzero(steps.sampled == kind) for kind in (False, True)]
        confidence = torch.from_numpy(steps.confidence[:, :width].copy())
        self._buffer: torch.Tensor
        if hasattr(runner.speculator, "confidence_logits"):
            self._buffer = runner.speculator.confidence_logits
            confidence = torch.logit(confidence.clamp(_LEAST, _MOST))
        else:
            self._buffer = runner.speculator.draft_token_confidence_probs
        self._confidence = confidence.to(device)
        self._accepted = torch.from_numpy(np.minimum(steps.accepted, width)).to(device)
        self._next = torch.from_numpy(steps.successors()).to(device)
        self._step = torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=device)
        self._limit = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=device)
        self._seated: dict[int, str] = {}  # slot -> who its step is about
        self._followed: list[str] = []

    def drafted(self, batch: Any) -> None:
        """A block was drafted for every request of the batch: each goes on by a recorded step."""
        self._follow(batch)
        slots = batch.idx_mapping[: batch.num_reqs]
        steps = self._next[self._step[slots]]
        self._step[slots] = steps
        self._limit[slots] = self._accepted[steps]
        self._buffer[: batch.num_reqs] = self._confidence[steps]

    def refused(self, batch: Any) -> torch.Tensor:
        """[N] rows of the batch whose draft the recording did not accept."""
        rows = batch.logits_indices.shape[0]
        column = batch.expanded_local_pos[:rows]  # 0 is no draft, k the k-th
        return column > self._limit[batch.expanded_idx_mapping[:rows]]

    def _follow(self, batch: Any) -> None:
        """Let slots that changed hands start from their request's first step."""
        if batch.req_ids == self._followed:
            return
        self._followed = list(batch.req_ids)
        fresh: dict[int, int] = {}
        for name, slot in zip(batch.req_ids, batch.idx_mapping_np.tolist(), strict=True):
            if self._seated.get(slot) == name:
                continue
            self._seated[slot] = name
            fresh[slot] = int(self._last_of[self.recorded(name)])
        if fresh:
            pair = torch.tensor([list(fresh), list(fresh.values())], dtype=torch.int64)
            if self._step.device.type != "cpu":
                pair = pair.pin_memory().to(self._step.device, non_blocking=True)
            self._step[pair[0]] = pair[1]

    def recorded(self, request_id: str) -> int:
        """The recorded request that this one repeats; raises EngineError if there is none."""
        mark = _MARK.search(request_id)
        if mark is None:
            raise EngineError(
                f"request {request_id!r} is not of the benchmark, and this engine replays a "
                "recording for those only"
            )
        sampled = mark[1] == "s"
        choices = self._classes[sampled]
        if not len(choices):
            kind = "sampled" if sampled else "greedy"
            raise EngineError(
                f"the recording has no {kind} request; record at temperature "
                f"{1 if sampled else 0}, or measure the other one"
            )
        return int(choices[int(mark[2], 16) % len(choices)])


def _replayed_drafts(kind: Any) -> type:
    """A speculator class whose draft passes say what was recorded."""

    class ReplayedDrafts(kind):  # type: ignore[misc]
        dspark_replay: TraceReplay

        def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            # ours clears the flag within the call; a width of 0 drafts nothing
            width = kwargs.get("num_speculative_tokens")
            drafts_now = getattr(self, "draft_next", True) and width != 0
            drafts: torch.Tensor = super().propose(*args, **kwargs)
            if drafts_now and not kwargs.get("dummy_run"):
                self.dspark_replay.drafted(args[0] if args else kwargs["input_batch"])
            return drafts

    return ReplayedDrafts


def _replayed_rejection(kind: Any) -> type:
    """A rejection sampler class to which drafts past the recorded length are invalid."""

    class ReplayedRejection(kind):  # type: ignore[misc]
        dspark_replay: TraceReplay

        def __call__(
            self,
            logits: torch.Tensor,
            input_batch: Any,
            draft_logits: torch.Tensor | None = None,
            invalid_drafts: torch.Tensor | None = None,
        ) -> Any:
            refused = self.dspark_replay.refused(input_batch)
            if invalid_drafts is not None:
                refused |= invalid_drafts
            return super().__call__(logits, input_batch, draft_logits, refused)

    return ReplayedRejection


def install_replay(runner: Any, steps: RecordedSteps) -> TraceReplay:
    """Replay a recording in this engine from now on; raises EngineError where that cannot be.

    The runner's speculator and rejection sampler, stock or ours, become instances of subclasses of
    their classes, so whoever asks for their type gets the answer that it expects. A second call
    changes the recording; no request may be running then.
    """
    sampler, speculator = runner.rejection_sampler, runner.speculator
    rates = getattr(sampler, "synthetic_conditional_rates", None)
    if speculator is None or rates is None or not bool((rates == 1.0).all()):
        raise EngineError(
            "a recording is replayed only in an engine with drafts and "
            "rejection_sample_method 'synthetic' at rates of 1; start it through "
            "`vllm-dspark bench --replay`"
        )
    if getattr(speculator, "has_confidence", True) is False:
        raise EngineError("the drafter has no confidence head, so nothing can be said for it")
    replay = TraceReplay(runner, steps)
    for part, replayed in ((speculator, _replayed_drafts), (sampler, _replayed_rejection)):
        if not hasattr(part, "dspark_replay"):
            part.__class__ = replayed(type(part))
        part.dspark_replay = replay
    logger.warning(
        "vllm-dspark: TEST FACILITY: this engine REPLAYS RECORDED acceptance and confidences "
        "(%d steps of %d requests); its output is MEANINGLESS, only its speed is measured",
        len(steps.accepted),
        len(steps.sampled),
    )
    return replay
