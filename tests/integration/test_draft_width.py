"""Draft passes narrower than K around vLLM's own scheduler, without an engine: a made-up worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.test_scheduler_core import add_request, options, settled
from tests.support.pairs import Pair
from tests.support.schedulers import MadeUpWorker, bare_scheduler
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration import draft_width
from vllm_dspark.integration.compat import CPU_WORKER, GPU_WORKER
from vllm_dspark.planning.plan import PlanKind, VerifyPlan
from vllm_dspark.planning.width import WidthReason

pytestmark = pytest.mark.usefixtures("runner_choice")

K = 7
# Full passes of 8 requests take half of a step: with half of the drafts accepted, few columns pay.
COSTLY = {"base_ms": 40.0, "per_token_ms": 1.0, "draft_ms": 80.0, "narrow_share": 0.1}
# One request alone: columns cost next to nothing.
CHEAP = {"base_ms": 100.0, "per_token_ms": 0.05, "draft_ms": 0.1, "narrow_share": 0.1}


def config(**changes: Any) -> Any:
    """The parts of a VllmConfig that the table looks at."""
    values = {
        "width": K,
        "data": 1,
        "pipeline": 1,
        "worker": CPU_WORKER,
        **changes,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=values["width"]),
        parallel_config=SimpleNamespace(
            data_parallel_size=values["data"],
            pipeline_parallel_size=values["pipeline"],
            worker_cls=values["worker"],
        ),
    )


@pytest.mark.parametrize(
    ("changes", "wish", "part"),
    [
        pytest.param({}, "auto", "", id="CPU build"),
        pytest.param({}, "full", '"draft_width": "full"', id="switched off"),
        pytest.param({"worker": GPU_WORKER}, "auto", "", id="CUDA"),
        pytest.param({"pipeline": 2}, "auto", "pipeline", id="pipeline parallel"),
        pytest.param({"data": 2}, "auto", "data parallel", id="data parallel"),
        pytest.param({"worker": "theirs.Worker"}, "auto", "theirs.Worker", id="own worker"),
        pytest.param({"width": 1}, "auto", "num_speculative_tokens = 1", id="K = 1"),
    ],
)
def test_where_passes_may_be_narrow(changes: dict[str, Any], wish: str, part: str) -> None:
    """Catches a row of the table in draft_width.py that says something else than the code."""
    found = draft_width.narrow_refusal(config(**changes), DSparkConfig(draft_width=wish))
    assert (found == "") if part == "" else (part in found)


def narrow(worker: MadeUpWorker) -> list[VerifyPlan]:
    return [plan for plan in worker.plans if plan.draft_width is not None]


@pytest.mark.parametrize("windows", ["host", "device"])
def test_a_narrow_pass_is_ordered_and_only_its_drafts_exist(
    pair: Pair, tmp_path: Path, windows: str
) -> None:
    """Catches a width that the worker never hears of, and drafts counted that were never made."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY, windows=windows))
    worker = settled(scheduler)
    before = scheduler.dspark_totals.drafted.copy()
    outputs = [worker.step() for _ in range(10)]
    widths = [plan.columns for plan in worker.plans]
    assert len(narrow(worker)) >= 9, [(plan.kind, plan.columns) for plan in worker.plans]
    for plan, output in zip(worker.plans, outputs, strict=True):
        if plan.draft_next:
            assert output.num_spec_tokens_to_schedule == plan.columns
    for made, output in zip(widths, outputs[1:], strict=False):
        drafts = output.scheduled_spec_decode_tokens
        assert max(map(len, drafts.values()), default=0) <= made
    drafted = scheduler.dspark_totals.drafted - before
    most = max(widths[:-1])
    assert most < K
    assert (drafted[:1] >= 8 * 9).all()
    assert drafted[most:].sum() <= 8 * (K - most)  # at most those of the step before these ten


def test_columns_that_were_not_drafted_are_nowhere(pair: Pair, tmp_path: Path) -> None:
    """Catches absent columns counted as trimmed, judged, invalid, or taught as rejections."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY, test_draft_width=2))
    worker = settled(scheduler, steps=12)  # what full width had taught is folded in by then
    totals, table = scheduler.dspark_totals, scheduler.conductor.table
    sums = {name: getattr(totals, name).copy() for name in ("drafted", "trimmed", "judged")}
    prior, paired = table.posterior.prior(False).copy(), table.live.paired.copy()
    for _ in range(40):
        worker.step()
    for name, before in sums.items():
        assert (getattr(totals, name) - before)[2:].sum() == 0, name
    assert (totals.drafted - sums["drafted"])[:2].sum() == 2 * 8 * 40
    assert (table.posterior.prior(False)[2:] == prior[2:]).all()
    assert (table.posterior.prior(False)[:2] != prior[:2]).all()
    assert (table.live.paired - paired)[2:].sum() == 0
    assert scheduler.conductor.rows.invalid[0] == 0


def test_full_width_returns_within_two_steps_of_the_load_falling(
    pair: Pair, tmp_path: Path
) -> None:
    """Catches narrow passes that outlive the load they were for."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY, hysteresis_steps=4))
    worker = settled(scheduler, steps=30)
    worker.step()
    assert narrow(worker)
    from tests.support.costs import write_cost_table
    from vllm_dspark.artifacts.store import read_cost_table
    from vllm_dspark.planning.online_cost import CostModel

    cheap = read_cost_table(write_cost_table(tmp_path / "cheap.json", **CHEAP)).to_table()
    scheduler.conductor.planner.cost = CostModel(cheap, online=False, num_positions=K)
    worker.plans.clear()
    worker.step()
    output = worker.step()
    assert worker.plans[0].columns == K
    assert set(map(len, output.scheduled_spec_decode_tokens.values())) == {K}


def test_a_seeded_request_ends_narrow_passes_when_it_joins(pair: Pair, tmp_path: Path) -> None:
    """Catches tokens of a seeded request that follow from the load: its drafts have full width."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY), max_num_seqs=9)
    worker = settled(scheduler)
    worker.step()
    assert narrow(worker)
    worker.plans.clear()
    add_request(scheduler, "seeded", temperature=1.0, seed=3)
    outputs = [worker.step() for _ in range(4)]
    assert "seeded" in outputs[0].num_scheduled_tokens
    assert {output.num_spec_tokens_to_schedule for output in outputs} == {K}


def test_switched_off(pair: Pair, tmp_path: Path) -> None:
    """Catches narrow passes under `"draft_width": "full"`, and vLLM's own width overruled."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY, draft_width="full"))
    worker = settled(scheduler)
    outputs = [worker.step() for _ in range(10)]
    assert not narrow(worker)
    assert {output.num_spec_tokens_to_schedule for output in outputs} == {K}


def test_old_tables_keep_full_width(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an error, silence, or prices made up where a table has no narrow passes."""
    table = {name: value for name, value in COSTLY.items() if name != "narrow_share"}
    with caplog.at_level("INFO", logger="vllm.vllm_dspark"):
        scheduler = bare_scheduler(pair, options(tmp_path, table))
    worker = settled(scheduler)
    for _ in range(10):
        worker.step()
    assert not narrow(worker)
    (line,) = [r.getMessage() for r in caplog.records if "has no narrower" in r.getMessage()]
    assert "vllm-dspark profile" in line


def test_asynchronous_steps_have_as_many_placeholders_as_drafts_will_be_made(
    pair: Pair, tmp_path: Path
) -> None:
    """Catches a step scheduled ahead with K drafts of which the pass before it made two."""
    scheduler = bare_scheduler(
        pair, options(tmp_path, COSTLY, test_draft_width=2), asynchronous=True
    )
    assert type(scheduler).__mro__[2].__name__ == "AsyncScheduler"
    for index in range(4):
        add_request(scheduler, f"r{index}")
    worker = MadeUpWorker(scheduler, lambda name, drafts: drafts)
    ahead = [scheduler.schedule(), scheduler.schedule()]  # prompts, then drafts of a full pass
    for _ in range(8):
        ahead.append(scheduler.schedule())
        done = ahead.pop(0)
        scheduler.update_from_output(done, worker.run(done))
        counts = {name: len(d) for name, d in ahead[-1].scheduled_spec_decode_tokens.items()}
        assert counts == {f"r{index}": 2 for index in range(4)}
    assert scheduler.dspark_totals.drafted.tolist() == [7 * 4] * 2 + [4] * (K - 2)
    assert scheduler.dspark_totals.accepted[:2].tolist() == [7 * 4] * 2


def test_metrics_tell_the_widths(pair: Pair, tmp_path: Path) -> None:
    """Catches a histogram that misses passes or widths, and reasons that do not add up."""
    scheduler = bare_scheduler(pair, options(tmp_path, COSTLY, probe_interval=8))
    worker = settled(scheduler, steps=1)
    for _ in range(40):
        worker.step()
    plans = scheduler.dspark_metrics.plans
    counted = np.zeros(K)
    for plan in worker.plans:
        if plan.draft_next:
            counted[plan.columns - 1] += 1
    seen = plans.pass_width[:K].copy()
    seen[K - 1] -= plans.drafted[0] - sum(plan.draft_next for plan in worker.plans)  # the first
    assert (seen == counted).all()
    assert plans.pass_width[:-1].sum() == plans.drafted[0] == plans.width_reasons.sum()
    reasons = list(WidthReason)
    assert plans.width_reasons[reasons.index(WidthReason.PROBE)] >= 3
    assert plans.width_reasons[reasons.index(WidthReason.BEST)] >= 20
    assert {plan.kind for plan in worker.plans[10:]} == {PlanKind.TRIM}
