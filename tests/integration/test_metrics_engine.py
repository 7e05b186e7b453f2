"""Metrics of real engines: exact numbers at stops, with windows, off, and after restarts."""

import os
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.artifacts.records import fingerprint
from tests.planning.builders import grid
from tests.support.engines import dspark, engine, scheduler_of, token_lists
from tests.support.pairs import PairSpec, build_pair
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape

pytestmark = pytest.mark.engine

K = 4
SPEC = PairSpec(kind="markov", noise=0.0, block_size=K)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pair in which every draft is accepted at T=0.

    The target's layers add nothing, so it is a function of the last token alone, which is what the
    drafter's head holds.
    """
    pair = build_pair(tmp_path_factory.mktemp("accepting-pair"), SPEC)
    weights = load_file(pair.target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, pair.target / "model.safetensors")
    return pair


def params(**changes):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, **changes})


def prompt(seed, length=5):
    return {"prompt_token_ids": [(31 * seed + 7 * i) % 200 for i in range(length)]}


def read(llm):
    """Value (or values by their own label) of each counter and gauge, by short name."""
    found = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        own = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
        if hasattr(metric, "values"):
            found[name] = metric.values
        elif hasattr(metric, "buckets"):
            found[name] = (metric.count, metric.sum)
        elif own:
            found.setdefault(name, {})[tuple(own.values())] = metric.value
        else:
            assert name not in found, f"duplicate {name}"
            found[name] = metric.value
    return found


def increase(before, after, name):
    """By how much a counter rose, summed over its labels."""

    def total(value):
        return sum(value.values()) if isinstance(value, dict) else value

    return total(after[name]) - total(before.get(name, 0))


def run(llm, prompts, parameters):
    """Generate; returns (token lists, increase of a counter by name)."""
    before = read(llm)
    lists = token_lists(llm.generate(prompts, parameters, use_tqdm=False))
    after = read(llm)
    return lists, lambda name: increase(before, after, name)


def folders():
    return set(Path(tempfile.gettempdir()).glob(f"vllm-dspark-metrics-{os.getpid()}-*/*"))


class TestExactNumbers:
    """One engine in which all drafts are accepted: every step gives K + 1 tokens until a stop."""

    @pytest.fixture(scope="class")
    def llm(self, pair):
        with engine(
            pair.target,
            dspark(pair.drafter, num_speculative_tokens=K),
            max_model_len=64,
            per_request_spec_decode_metrics="detailed",
        ) as llm:
            yield llm

    def check(self, rose, *, rows, accepted, emitted, discarded):
        assert rose("dspark_request_steps") == rows
        assert rose("dspark_drafted_tokens") == rose("dspark_verified_tokens") == rows * K
        assert rose("dspark_accepted_tokens") == accepted
        assert rose("dspark_emitted_tokens") == emitted
        assert rose("dspark_discarded_tokens") == discarded
        assert rose("spec_decode_num_drafts") == rows
        assert rose("spec_decode_num_draft_tokens") == rows * K
        assert rose("spec_decode_num_accepted_tokens") == accepted

    def test_no_stop_inside_a_block(self, llm):
        # 1 by the prefill, then 5 + 5
        lists, rose = run(llm, [prompt(1)], params(max_tokens=11))
        assert len(lists[0]) == 11
        self.check(rose, rows=2, accepted=8, emitted=10, discarded=0)

    @pytest.mark.parametrize(("max_tokens", "accepted"), [(7, 5), (8, 6), (10, 8)])
    def test_max_tokens_inside_a_block(self, llm, max_tokens, accepted):
        lists, rose = run(llm, [prompt(1)], params(max_tokens=max_tokens))
        assert len(lists[0]) == max_tokens
        self.check(
            rose, rows=2, accepted=accepted, emitted=max_tokens - 1, discarded=11 - max_tokens
        )

    def test_several_requests(self, llm):
        lists, rose = run(llm, [prompt(i) for i in range(1, 5)], params(max_tokens=8))
        assert [len(tokens) for tokens in lists] == [8] * 4
        self.check(rose, rows=8, accepted=24, emitted=28, discarded=12)

    def test_a_stop_token_inside_a_block(self, llm):
        (free,), _ = run(llm, [prompt(3)], params(max_tokens=11))
        stop = next(t for t in free[6:] if free.index(t) >= 6 and free.index(t) < 10)
        at = free.index(stop)  # the second block holds tokens 6..10; the last one is no draft
        lists, rose = run(llm, [prompt(3)], params(max_tokens=30, stop_token_ids=[stop]))
        assert lists == [free[: at + 1]]
        self.check(rose, rows=2, accepted=4 + at - 5, emitted=at, discarded=10 - at)

    def test_max_model_len_inside_a_block(self, llm):
        # 64 - 55 = 9 tokens: 1 by the prefill, 5, and 3; vLLM cuts two drafts of the last block
        lists, rose = run(llm, [prompt(5, length=55)], params(max_tokens=60))
        assert len(lists[0]) == 9
        assert rose("dspark_emitted_tokens") == 8
        assert rose("dspark_verified_tokens") == rose("spec_decode_num_draft_tokens") == 6
        assert rose("dspark_accepted_tokens") == rose("spec_decode_num_accepted_tokens") == 6
        assert rose("dspark_trimmed_tokens") == 2
        assert rose("dspark_discarded_tokens") == 0

    def test_metrics_of_a_single_request(self, llm):
        (output,) = llm.generate([prompt(1)], params(max_tokens=8), use_tqdm=False)
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_accepted == [4, 2]
        assert metrics.per_step_drafted == [4, 4]

    def test_a_prompt_of_one_token_that_joins_others(self, llm):
        """Catches vLLM's padding of such a prompt counted as drafts that were rejected."""
        engine_ = llm.llm_engine
        engine_.add_request("first", prompt(1), params(max_tokens=21))
        for _ in range(3):
            engine_.step()
        engine_.add_request("joins", {"prompt_token_ids": [7]}, params(max_tokens=11))
        ended = {}
        while engine_.has_unfinished_requests():
            ended |= {o.request_id: o.outputs[0] for o in engine_.step() if o.finished}
        metrics = ended["joins"].spec_decode_metrics
        assert metrics.per_step_drafted == metrics.per_step_accepted == [4, 4]
        assert metrics.histogram == [0, 0, 0, 0, 2] and metrics.num_draft_tokens == 8
        assert ended["first"].spec_decode_metrics.per_step_drafted == [4] * 4

    def test_judged_leaves_out_what_is_behind_a_stop(self, llm):
        _, rose = run(llm, [prompt(1)], params(max_tokens=8))
        assert rose("dspark_judged_tokens") == rose("dspark_accepted_tokens") == 6

    def test_reasons_and_labels(self, llm):
        seen = read(llm)
        ((reason, value),) = seen["dspark_scheduling"].items()
        assert value == 0
        assert "scheduling is disabled" in reason[0]
        assert set(seen["dspark_steps"]) == {("unplanned", "unplanned")}
        assert set(seen["dspark_fallbacks"]) == {("scheduling_off",)}
        assert seen["dspark_draft_width"] == K


def test_trimmed_drafts_are_neither_rejected_nor_drafted_for_vllm(pair):
    """Windows of 3: two drafts a step, all accepted, and vLLM's quotient says so."""
    options = {"test_windows": 3}
    with engine(pair.target, dspark(pair.drafter, options, num_speculative_tokens=K)) as llm:
        lists, rose = run(llm, [prompt(1), prompt(2)], params(max_tokens=10))
        assert [len(tokens) for tokens in lists] == [10, 10]
        rows = 2 * 3  # 1 by the prefill, then 3 + 3 + 3
        assert rose("dspark_request_steps") == rows
        assert rose("dspark_drafted_tokens") == rows * K
        assert rose("dspark_trimmed_tokens") == rows * (K - 2)
        assert rose("dspark_accepted_tokens") == rows * 2
        assert rose("spec_decode_num_draft_tokens") == rows * 2
        assert rose("spec_decode_num_accepted_tokens") == rows * 2
        assert read(llm)["dspark_window"] == (rows, rows * 3)


def test_engines_come_and_go(pair, tmp_path, caplog):
    """Catches series of a dead engine that stay, and files that stay."""
    before = folders()
    speculative = dspark(pair.drafter, num_speculative_tokens=K)
    with engine(pair.target, speculative) as llm:
        run(llm, [prompt(1)], params(max_tokens=11))
        assert len(folders() - before) == 1
        assert read(llm)["dspark_emitted_tokens"] == 10
        # a second engine of the same process: sums while both live, without an exception
        with engine(pair.target, speculative, served_model_name="other") as other:
            other.generate([prompt(1)], params(max_tokens=6), use_tqdm=False)
            names = {m.labels["model_name"] for m in other.get_metrics() if "dspark" in m.name}
            assert names == {str(pair.target), "other"}
    assert folders() == before
    off = dspark(pair.drafter, {"metrics": False}, num_speculative_tokens=K)
    with engine(pair.target, off) as llm:
        run(llm, [prompt(1)], params(max_tokens=6))
        assert scheduler_of(llm).dspark_metrics.sinks == []
        assert not any("dspark" in metric.name for metric in llm.get_metrics())
        assert folders() == before


def steep_table(path):
    """A cost table in which four tokens cost as much as a step, so that trimming pays."""
    sizes = [1, 2, 4, 8, 16, 64]
    cells = grid(sizes, [4.0 + size for size in sizes])
    shapes = (StepShape.RAGGED, StepShape.NATIVE, StepShape.SINGLE)
    table = CostTable(
        {(StepMode.EAGER, shape): cells for shape in shapes}, grid((1, 8), (0.1, 0.2))
    )
    record = CostTableRecord.from_table(table, fingerprint(num_speculative_tokens=K))
    path.write_text(record.model_dump_json())
    return str(path)


def test_a_planned_engine(build, tmp_path):
    """Plans, prices and confidences of a real engine reach the metrics and agree."""
    pair = build(PairSpec(kind="markov", block_size=K))
    options = {
        "scheduling": "auto",
        "cost_table": steep_table(tmp_path / "t.json"),
        "online_cost": False,  # plans must not depend on how long steps take here
    }
    with engine(pair.target, dspark(pair.drafter, options, num_speculative_tokens=K)) as llm:
        prompts = [prompt(i) for i in range(4)]
        lists, rose = run(llm, prompts, params(max_tokens=60))
        metrics = scheduler_of(llm).dspark_metrics
        metrics._next_slow = 0.0
        metrics.publish()
        seen = read(llm)
    assert [len(tokens) for tokens in lists] == [60] * 4
    assert rose("dspark_emitted_tokens") == 4 * 59
    kinds = {}
    for (kind, _), count in seen["dspark_steps"].items():
        kinds[kind] = kinds.get(kind, 0) + count
    assert kinds["unplanned"] == 1  # the prefill
    assert kinds.get("trim", 0) + kinds.get("skip_draft", 0) > 0
    steps = sum(kinds.values())
    assert seen["dspark_draft_passes"] + seen["dspark_skipped_draft_passes"] == steps
    assert seen["dspark_scheduling"] == {("",): 1.0}
    for position in range(K):
        at = {
            name: seen[f"dspark_{name}_tokens"][(str(position),)]
            for name in ("drafted", "admitted", "trimmed", "verified", "judged", "accepted")
        }
        assert at["drafted"] == at["admitted"] + at["trimmed"]
        assert at["admitted"] >= at["verified"] >= at["judged"] >= at["accepted"]
    assert rose("dspark_trimmed_tokens") > 0
    assert rose("spec_decode_num_draft_tokens") == rose("dspark_verified_tokens")
    assert rose("spec_decode_num_accepted_tokens") == rose("dspark_accepted_tokens")
    rows, window_sum = seen["dspark_window"]
    assert rows == seen["dspark_request_steps"]
    assert window_sum == rows + rose("dspark_verified_tokens")
    assert seen["dspark_predicted_tokens"] > 0
    assert 0 < seen["dspark_timed_steps"] <= steps
    assert seen["dspark_step_time_ratio"][0] == seen["dspark_timed_steps"]
    assert sum(seen["dspark_confidence_rows"].values()) > 0
    assert seen["dspark_paired_drafts"][("0",)] > 0
    assert set(seen["dspark_ece"]) <= {(str(k),) for k in range(K)}
