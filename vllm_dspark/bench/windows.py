"""What became of drafts in a cell, from the increase of the engine's counters.

With the plugin, its own counters say it (drafted, admitted, verified and accepted, plans and step
times); stock engines have vLLM's three counters, where every scheduled draft counts as verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Counters = Mapping[str, float]
_OURS, _STOCK = "vllm:dspark_", "vllm:spec_decode_"


def family_sum(counters: Counters, name: str) -> float:
    """Sum of a counter over its labels."""
    full = f"{name}_total"
    return sum(v for key, v in counters.items() if key.split("{", 1)[0] == full)


def by_labels(counters: Counters, name: str) -> dict[str, float]:
    """A counter's increase by its labels, as `kind=trim,reason=trim_gain`."""
    prefix = f"{name}_total{{"
    return {k[len(prefix) : -1]: v for k, v in counters.items() if k.startswith(prefix)}


@dataclass(frozen=True)
class Drafts:
    """Sums over the cells of one mode in one row; what was not counted is None."""

    request_steps: float = 0.0
    drafted: float | None = None
    admitted: float | None = None
    verified: float = 0.0
    accepted: float = 0.0
    plans: dict[str, float] = field(default_factory=dict)
    timed_steps: float = 0.0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    draft_s: float = 0.0
    promised: float = 0.0
    realised: float = 0.0
    graphs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def sum_of(cls, cells: Iterable[Counters]) -> Drafts:
        """Read the counters of several cells."""
        total: dict[str, float] = {}
        for counters in cells:
            for name, value in counters.items():
                total[name] = total.get(name, 0.0) + value
        if not any(name.startswith(_OURS) for name in total):
            return cls(
                request_steps=family_sum(total, f"{_STOCK}num_drafts"),
                verified=family_sum(total, f"{_STOCK}num_draft_tokens"),
                accepted=family_sum(total, f"{_STOCK}num_accepted_tokens"),
            )
        return cls(
            request_steps=family_sum(total, f"{_OURS}request_steps"),
            drafted=family_sum(total, f"{_OURS}drafted_tokens"),
            admitted=family_sum(total, f"{_OURS}admitted_tokens"),
            verified=family_sum(total, f"{_OURS}verified_tokens"),
            accepted=family_sum(total, f"{_OURS}accepted_tokens"),
            plans=by_labels(total, f"{_OURS}steps"),
            timed_steps=family_sum(total, f"{_OURS}timed_steps"),
            measured_s=family_sum(total, f"{_OURS}measured_step_seconds"),
            predicted_s=family_sum(total, f"{_OURS}predicted_step_seconds"),
            draft_s=family_sum(total, f"{_OURS}measured_draft_seconds"),
            promised=family_sum(total, f"{_OURS}predicted_tokens"),
            realised=family_sum(total, f"{_OURS}realised_tokens"),
            graphs=by_labels(total, f"{_OURS}graph_steps"),
        )

    def as_json(self) -> dict[str, Any]:
        """Shares and means for the report; None where nothing was counted."""
        steps, timed = self.request_steps, self.timed_steps
        num_plans = sum(self.plans.values())
        skipped = sum(v for k, v in self.plans.items() if "kind=skip_draft" in k)
        return {
            "accepted_length": _over(self.accepted + steps, steps),
            "window": _over(self.verified + steps, steps),
            "drafted_per_step": _over(self.drafted, steps),
            "admitted_per_step": _over(self.admitted, steps),
            "verified_per_step": _over(self.verified, steps) if steps else None,
            "accepted_per_step": _over(self.accepted, steps) if steps else None,
            "plans": dict(sorted(self.plans.items(), key=lambda item: -item[1])),
            "skip_share": _over(skipped, num_plans),
            "step_ms": _over(1e3 * self.measured_s, timed),
            "predicted_step_ms": _over(1e3 * self.predicted_s, timed),
            "draft_share": _over(self.draft_s, self.measured_s),
            "realised_over_predicted_tokens": _over(self.realised, self.promised),
            "graph_steps": self.graphs,
        }


def _over(numerator: float | None, denominator: float) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
