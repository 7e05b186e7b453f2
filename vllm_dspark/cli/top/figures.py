"""From changes of metrics to the figures that are shown; names: docs/metrics.md."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_dspark.cli.top.scrape import Change, EngineKey


@dataclass(frozen=True)
class EngineFigures:
    """One engine in one period; None where nothing was counted or published."""

    model: str
    engine: str
    seconds: float  # 0: since the engine's start
    restarted: bool
    running: float
    waiting: float
    kv_usage: float | None  # share
    tokens_per_s: float | None
    steps_per_s: float | None
    scheduling: bool | None  # None: the plugin is not there
    off_reason: str
    width: int  # K
    accepted_length: float | None
    mean_window: float | None
    windows: dict[int, float]  # share of rows by window
    acceptance: tuple[float | None, ...]  # by position, of judged drafts
    kinds: dict[str, float]  # share of steps
    reasons: dict[str, float]  # share of steps
    draft_share: float | None  # steps with a draft pass
    measured_ms: float | None
    predicted_ms: float | None
    tokens_kept: float | None  # realised over predicted tokens
    ece: float | None  # mean over positions
    ece_by_position: tuple[float | None, ...]
    drifted_cells: int
    invalid_confidences: float
    fallbacks: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """JSON types; windows keep their order."""
        return {**asdict(self), "windows": {str(k): v for k, v in self.windows.items()}}


def figures_of(changed: Mapping[EngineKey, Change]) -> list[EngineFigures]:
    """All engines, by model and number."""
    ordered = sorted(changed.items(), key=lambda item: (item[0][0], _number(item[0][1])))
    return [_engine(model, engine, change) for (model, engine), change in ordered]


def _number(engine: str) -> tuple[int, str]:
    return (int(engine), "") if engine.isdigit() else (1 << 30, engine)


def _engine(model: str, engine: str, c: Change) -> EngineFigures:
    states = list(c.samples("dspark_scheduling"))
    on = states[0][1] > 0 if states else None
    measured = c.ratio("dspark_measured_step_seconds_total", "dspark_timed_steps_total")
    predicted = c.ratio("dspark_predicted_step_seconds_total", "dspark_timed_steps_total")
    width = int(c.total("dspark_draft_width"))
    ece = _by_position(dict(_positions(c, "dspark_ece")), width)
    known = [value for value in ece if value is not None]
    usage = list(c.samples("kv_cache_usage_perc"))
    steps = c.total("dspark_steps_total")
    drafting = c.total("dspark_draft_passes_total")
    passes = drafting + c.total("dspark_skipped_draft_passes_total")
    return EngineFigures(
        model=model,
        engine=engine,
        seconds=c.seconds,
        restarted=c.restarted,
        running=c.total("num_requests_running"),
        waiting=c.total("num_requests_waiting"),
        kv_usage=usage[0][1] if usage else None,
        tokens_per_s=_rate(c, "generation_tokens_total"),
        steps_per_s=_rate(c, "dspark_steps_total") if states else None,
        scheduling=on,
        off_reason=states[0][0].get("reason", "") if states else "",
        width=width,
        accepted_length=c.ratio("dspark_emitted_tokens_total", "dspark_request_steps_total"),
        mean_window=c.ratio("dspark_window_sum", "dspark_window_count"),
        windows=_windows(c),
        acceptance=_acceptance(c, width),
        kinds=_shares(c.by_label("dspark_steps_total", "kind"), steps),
        reasons=_shares(c.by_label("dspark_steps_total", "reason"), steps),
        draft_share=drafting / passes if passes else None,
        measured_ms=None if measured is None else 1e3 * measured,
        predicted_ms=None if predicted is None else 1e3 * predicted,
        tokens_kept=c.ratio("dspark_realised_tokens_total", "dspark_predicted_tokens_total"),
        ece=sum(known) / len(known) if known else None,
        ece_by_position=ece,
        drifted_cells=int(c.total("dspark_cost_drifted_cells")),
        invalid_confidences=c.total("dspark_invalid_confidences_total"),
        fallbacks=c.by_label("dspark_fallbacks_total", "reason"),
    )


def _rate(c: Change, name: str) -> float | None:
    """Per second; None without a period (totals since the start have no known length)."""
    return c.total(name) / c.seconds if c.seconds > 0 else None


def _shares(sums: Mapping[str, float], whole: float) -> dict[str, float]:
    return {name: value / whole for name, value in sums.items()} if whole else {}


def _positions(c: Change, name: str) -> list[tuple[int, float]]:
    return [
        (int(labels["position"]), value)
        for labels, value in c.samples(name)
        if labels.get("position", "").isdigit()
    ]


def _by_position(values: Mapping[int, float], width: int) -> tuple[float | None, ...]:
    found = (values.get(k) for k in range(width))
    return tuple(None if v is None or math.isnan(v) else v for v in found)


def _acceptance(c: Change, width: int) -> tuple[float | None, ...]:
    accepted = dict(_positions(c, "dspark_accepted_tokens_total"))
    judged = dict(_positions(c, "dspark_judged_tokens_total"))
    rates = {k: accepted.get(k, 0.0) / n for k, n in judged.items() if n > 0}
    return _by_position(rates, width)


def _windows(c: Change) -> dict[int, float]:
    """Share of rows by window, from cumulative buckets."""
    total = c.total("dspark_window_count")
    bounds = sorted(
        (float(labels["le"]), value) for labels, value in c.samples("dspark_window_bucket")
    )
    shares, before = {}, 0.0
    for bound, count in bounds:
        if total and math.isfinite(bound):
            shares[int(bound)] = max(count - before, 0.0) / total
        before = count
    return shares
