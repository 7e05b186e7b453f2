"""Traces: what a drafter said and what became of it, request by request and step by step.

An engine records pairs of both with `"record_confidences": FILE` (artifacts/pairs.py); take
`"scheduling": false` with it, since full windows cut no outcome off. `read_trace` takes that file,
or the compact form that `write_trace` makes of it (npz, versioned like the other artifacts).
"""

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.artifacts.pairs import Pair, read_pairs
from vllm_dspark.errors import TraceError

KIND, VERSION = "trace", 1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
_ARRAYS = {
    "first": np.int64,
    "position": np.int32,
    "confidence": np.float32,
    "accepted": np.int32,
    "prompt": np.int32,
    "output": np.int32,
    "limit": np.int32,
    "sampled": np.bool_,
}


@dataclass(frozen=True, eq=False)
class Trace:
    """R requests with P steps in all; steps of a request stand together, in order."""

    first: Int64Array  # [R + 1] first step of each request
    position: Int32Array  # [P] output tokens before the step
    confidence: npt.NDArray[np.float32]  # [P, K] raw c_k
    accepted: Int32Array  # [P] accepted drafts if all K are verified
    prompt: Int32Array  # [R] tokens
    output: Int32Array  # [R] tokens
    limit: Int32Array  # [R] max_tokens
    sampled: npt.NDArray[np.bool_]  # [R] temperature > 0
    notes: Mapping[str, Any] = field(default_factory=dict)  # counts of the recording

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise TraceError(f"trace refused: {problem}; record it again")

    def _problem(self) -> str:
        """What is wrong with the arrays; empty if nothing is."""
        steps, requests = len(self.position), len(self.prompt)
        if not requests or not steps:
            return "it holds no request with a verified draft"
        if self.confidence.shape[:1] != (steps,) or self.confidence.ndim != 2:
            return f"confidences of shape {self.confidence.shape} for {steps} steps"
        first, width = self.first, self.confidence.shape[1]
        indexed = len(first) == requests + 1 and first[0] == 0 and first[-1] == steps
        if not indexed or (np.diff(first) < 1).any():
            return "its index of steps does not fit its requests"
        if self.accepted.min() < 0 or self.accepted.max() > width:
            return f"an accepted count lies outside 0..{width}"
        lengths = (self.output, self.limit, self.prompt)
        return "a length is below 1" if min(int(a.min()) for a in lengths) < 1 else ""

    @property
    def width(self) -> int:
        """K of the recording."""
        return int(self.confidence.shape[1])

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.prompt)

    @property
    def accepted_length(self) -> float:
        """Mean tokens per step at full windows, the target's own included."""
        return float(self.accepted.mean()) + 1.0

    def narrowed(self, width: int) -> "Trace":
        """The same recording for a smaller K."""
        if not 1 <= width <= self.width:
            raise TraceError(
                f"K = {width} cannot be simulated from a trace of K = {self.width}; choose "
                f"1..{self.width} or record with a larger num_speculative_tokens"
            )
        if width == self.width:
            return self
        values = {name: getattr(self, name) for name in _ARRAYS}
        values["confidence"] = np.ascontiguousarray(self.confidence[:, :width])
        values["accepted"] = np.minimum(self.accepted, width).astype(np.int32)
        return Trace(**values, notes=self.notes)


def write_trace(path: Path, trace: Trace) -> None:
    """Write the compact form."""
    meta = json.dumps({"kind": KIND, "version": VERSION, "notes": dict(trace.notes)})
    arrays = {name: getattr(trace, name) for name in _ARRAYS}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, meta=np.array(meta), **arrays)


def read_trace(path: Path, seed: int = 0, prompt: int = 128) -> Trace:
    """A compact trace, or pairs as an engine records them; raises TraceError.

    seed: of the draws that complete cut-off outcomes; prompt: tokens of every prompt, which pairs
    do not tell (both for recorded pairs only, see `trace_of_pairs`).
    """
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            return _read_compact(path)
        width, pairs = read_pairs(path)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    return trace_of_pairs(pairs, width, seed=seed, prompt=prompt)


def _read_compact(path: Path) -> Trace:
    with np.load(path, allow_pickle=False) as archive:
        if "meta" not in archive or any(name not in archive for name in _ARRAYS):
            raise TraceError(f"{path} is no trace archive: it lacks some of its arrays")
        meta = json.loads(str(archive["meta"]))
        if meta.get("kind") != KIND or meta.get("version") != VERSION:
            raise TraceError(
                f"{path} holds kind {meta.get('kind')!r}, version {meta.get('version')!r}; this "
                f"release reads {KIND!r}, version {VERSION}"
            )
        arrays = {name: archive[name].astype(kind) for name, kind in _ARRAYS.items()}
    return Trace(**arrays, notes=meta.get("notes", {}))


@dataclass
class _Recorded:
    """One request while its pairs are read."""

    sampled: bool
    position: int = 1  # the prompt's last chunk emits a token before the first step
    steps: list[tuple[int, tuple[float, ...], int]] = field(default_factory=list)


def trace_of_pairs(pairs: Iterable[Pair], width: int, *, seed: int = 0, prompt: int = 128) -> Trace:
    """Requests in order of their first pair, steps in order of their draft passes.

    An outcome is cut off where a window or the end of the request hid later drafts and all that was
    seen was accepted: the rest is drawn from the confidences, draft by draft, and counted in
    `notes["completed"]`. A recording at full windows ("scheduling": false) has few of them.
    """
    rng = np.random.default_rng(seed)
    requests: dict[str, _Recorded] = {}
    counts = {"steps": 0, "completed": 0}
    for pair in sorted(pairs, key=lambda pair: pair.stamp):
        request = requests.setdefault(pair.request_id, _Recorded(pair.sampled))
        accepted = pair.accepted
        if accepted == pair.verified < width:
            counts["completed"] += 1
            while accepted < width and rng.random() < pair.confidence[accepted]:
                accepted += 1
        counts["steps"] += 1
        request.steps.append((request.position, pair.confidence, accepted))
        request.position += pair.accepted + 1
    return _assemble(list(requests.values()), counts, prompt)


def _assemble(requests: list[_Recorded], counts: dict[str, int], prompt: int) -> Trace:
    if not requests:
        raise TraceError(
            "the recording holds no pair of confidence and outcome: the drafter has no confidence "
            "head, or nothing was generated"
        )
    steps = [step for request in requests for step in request.steps]
    lengths = [len(request.steps) for request in requests]
    output = np.array([r.position for r in requests], dtype=np.int32)
    return Trace(
        first=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        position=np.array([step[0] for step in steps], dtype=np.int32),
        confidence=np.array([step[1] for step in steps], dtype=np.float32),
        accepted=np.array([step[2] for step in steps], dtype=np.int32),
        prompt=np.full(len(requests), max(prompt, 1), dtype=np.int32),
        output=output,
        limit=output.copy(),
        sampled=np.array([r.sampled for r in requests]),
        notes=counts,
    )


def synthetic_trace(
    acceptance: Iterable[float],
    *,
    num_requests: int = 256,
    output: int = 256,
    prompt: int = 128,
    spread: float = 0.0,
    sampled: bool = False,
    seed: int = 0,
) -> Trace:
    """Requests whose draft k is accepted with `acceptance[k]`, given those before it.

    spread: standard deviation, in logits, of how easy requests are. Confidences are the true
    probabilities.
    """
    rng = np.random.default_rng(seed)
    base = np.clip(np.array(list(acceptance), dtype=np.float64), 1e-4, 1.0 - 1e-4)
    if not base.size:
        raise TraceError("a synthetic trace needs the acceptance of at least one draft")
    shift = spread * rng.standard_normal(num_requests)
    positions: list[int] = []
    rows, accepted, first = [], [], [0]
    for i in range(num_requests):
        odds = np.log(base / (1.0 - base)) + shift[i]
        probability = (1.0 / (1.0 + np.exp(-odds))).astype(np.float32)
        position = 1
        while position < output:
            refused = np.flatnonzero(rng.random(base.size) >= probability)
            taken = int(refused[0]) if refused.size else base.size
            positions.append(position)
            rows.append(probability)
            accepted.append(taken)
            position += taken + 1
        if len(positions) == first[-1]:  # output of one token
            positions.append(1)
            rows.append(probability)
            accepted.append(0)
        first.append(len(positions))
    return Trace(
        first=np.array(first, dtype=np.int64),
        position=np.array(positions, dtype=np.int32),
        confidence=np.array(rows, dtype=np.float32),
        accepted=np.array(accepted, dtype=np.int32),
        prompt=np.full(num_requests, prompt, dtype=np.int32),
        output=np.full(num_requests, output, dtype=np.int32),
        limit=np.full(num_requests, output, dtype=np.int32),
        sampled=np.full(num_requests, sampled),
        notes={"synthetic": True},
    )
