"""Cost tables: what is refused, how prices are looked up and corrected."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.builders import grid, table_from
from vllm_dspark.errors import CostTableError
from vllm_dspark.planning.cost import (
    CostTable,
    StepMode,
    StepShape,
    StepTiming,
    build_cost_table,
)
from vllm_dspark.planning.online_cost import BOUND_CELL, BOUND_MODE, CostModel

FULL, EAGER = StepMode.FULL, StepMode.EAGER
RAGGED, NATIVE, SINGLE = StepShape.RAGGED, StepShape.NATIVE, StepShape.SINGLE


def simple(ragged, **changes):
    """An eager table with one ragged grid."""
    return CostTable(
        {(EAGER, RAGGED): ragged}, changes.pop("draft", grid((1, 8), (1, 2))), **changes
    )


GOOD = grid((1, 2, 4, 8), (1.0, 1.2, 1.5, 2.0))


class TestRefusals:
    @pytest.mark.parametrize(
        ("table", "reason"),
        [
            (CostTable({}, GOOD), "incomplete"),
            (CostTable({(FULL, RAGGED): GOOD}, GOOD), "incomplete"),
            (simple(grid((1,), (1.0,))), "incomplete"),
            (simple(grid((2, 1), (1.0, 2.0))), "incomplete"),
            (simple(grid((1, 2), [[1.0, 2.0]], kv_tokens=(0, 1))), "incomplete"),
            (simple(grid((1, 2), (1.0, np.nan))), "not_positive"),
            (simple(grid((1, 2), (0.0, 1.0))), "not_positive"),
            (simple(GOOD, draft=grid((1, 8), (1.0, -1.0))), "not_positive"),
            (simple(GOOD, allocation_ms=-1.0), "not_positive"),
            (simple(GOOD, overhead_ms=np.inf), "not_positive"),
            (simple(grid((1, 2), (1.0, 2.0), count=2)), "few_samples"),
            (simple(grid((1, 2, 4), (1.0, 1.005, 1.01))), "flat"),
            (simple(grid((1, 2, 4), (1.0, 2.0, 1.5), spread=0.05)), "non_monotone"),
        ],
    )
    def test_reason(self, table, reason):
        with pytest.raises(CostTableError) as caught:
            table.validate()
        assert caught.value.reason == reason
        assert reason in str(caught.value)

    def test_dips_within_the_spread_are_allowed(self):
        simple(grid((1, 2, 4), (1.0, 2.0, 1.9), spread=0.05)).validate()

    @pytest.mark.parametrize(("mode", "fits"), [(FULL, True), (EAGER, False)])
    def test_kernel_selection_dips_deeper_in_captured_graphs(self, mode, fits):
        """Qwen3-8B on an H200 takes 6.027 ms at 8 tokens and 5.694 ms at 16."""
        dipping = grid((8, 16, 64), (6.027, 5.694, 8.0), spread=0.001)
        table = CostTable({(mode, shape): dipping for shape in StepShape}, GOOD)
        if fits:
            table.validate()
            return
        with pytest.raises(CostTableError, match="non_monotone"):
            table.validate()

    def test_a_deep_dip_of_captured_graphs_is_refused(self):
        dipping = grid((8, 16, 64), (6.8, 5.694, 8.0), spread=0.01)
        table = CostTable({(FULL, shape): dipping for shape in StepShape}, GOOD)
        with pytest.raises(CostTableError, match="non_monotone"):
            table.validate()

    def test_flat_in_one_kv_node_is_flat(self):
        cells = [[1.0, 2.0], [3.0, 3.0]]
        with pytest.raises(CostTableError, match="flat"):
            simple(grid((1, 2), cells, kv_tokens=(0, 100))).validate()


class TestBuild:
    def samples(self, sizes=(1, 2, 4), kv_nodes=(0, 1000), repeats=5):
        rng = np.random.default_rng(0)
        for shape in StepShape:
            for kv in kv_nodes:
                for size in sizes:
                    for _ in range(repeats):
                        ms = 1.0 + 0.1 * size + kv / 1000 + 0.001 * rng.random()
                        draft = None if shape is SINGLE else 0.5
                        yield StepTiming(FULL, shape, size, size, kv, ms, draft)

    def test_cells_are_medians_with_spread_and_count(self):
        outlier = StepTiming(FULL, RAGGED, 4, 4, 0, 50.0, 9.0)
        table = build_cost_table([*self.samples(), outlier], allocation_ms=0.1)
        cells = table.grids[FULL, RAGGED]
        assert cells.sizes == (1, 2, 4)
        assert cells.kv_tokens == (0, 1000)
        np.testing.assert_allclose(cells.median_ms, [[1.1, 1.2, 1.4], [2.1, 2.2, 2.4]], atol=2e-3)
        assert cells.count[0, 2] == 6
        assert (cells.spread_ms[1] < 1e-3).all()
        np.testing.assert_allclose(table.draft.median_ms, 0.5)

    def test_holes_are_refused(self):
        samples = [s for s in self.samples() if (s.kv_tokens, s.num_tokens) != (1000, 2)]
        with pytest.raises(CostTableError, match="not measured at 2 tokens and 1000 kv"):
            build_cost_table(samples)

    def test_an_untimed_drafter_is_refused(self):
        samples = [s for s in self.samples() if s.draft_ms is None]
        with pytest.raises(CostTableError, match="drafter was never timed"):
            build_cost_table(samples)


class TestPrices:
    def model(self):
        cells = [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0]]
        table = CostTable(
            {
                (FULL, RAGGED): grid((1, 2, 4), cells, kv_tokens=(0, 1024)),
                (FULL, NATIVE): grid((4, 8), (3.0, 6.0)),
                (FULL, SINGLE): grid((1, 2), (1.0, 1.5)),
                (EAGER, RAGGED): grid((1, 5), (2.0, 6.0)),
            },
            grid((1, 5), (1.0, 3.0)),
        )
        return CostModel(table, online=False)

    def test_padded_modes_run_at_the_next_size(self):
        assert self.model().step_ms(FULL, RAGGED, 0, 3) == (4, 4.0)
        assert self.model().step_ms(FULL, NATIVE, 0, 5) == (8, 6.0)
        assert self.model().step_ms(FULL, RAGGED, 0, 5) is None

    def test_kv_axis_is_interpolated_and_continued(self):
        ms = [self.model().step_ms(FULL, RAGGED, kv, 2)[1] for kv in (0, 512, 1024, 2048)]
        np.testing.assert_allclose(ms, [2.0, 3.0, 4.0, 6.0])

    def test_elsewhere_sizes_are_interpolated_and_shapes_fall_back(self):
        for shape in StepShape:
            assert self.model().step_ms(EAGER, shape, 0, 3) == (3, 4.0)
            assert self.model().step_ms(EAGER, shape, 0, 7) == (7, 8.0)
        assert self.model().step_ms(StepMode.PIECEWISE, RAGGED, 0, 3) is None

    def test_draft_time_by_request_count(self):
        assert [self.model().draft_ms(n) for n in (1, 3, 5, 7)] == [1.0, 2.0, 3.0, 4.0]

    @given(st.integers(0, 5000), st.integers(1, 4))
    def test_never_cheaper_with_more_tokens_or_more_context(self, kv, size):
        model = self.model()
        here = model.step_ms(FULL, RAGGED, kv, size)[1]
        assert model.step_ms(FULL, RAGGED, kv + 500, size)[1] >= here
        assert model.step_ms(FULL, RAGGED, kv, min(size + 1, 4))[1] >= here


def timing(tokens, ms, shape=RAGGED, draft=None):
    return StepTiming(FULL, shape, 4, tokens, 0, ms, draft)


class TestOnline:
    def model(self):
        return CostModel(table_from(lambda t: 5.0 + 0.02 * t, range(8, 257, 8), 7))

    def price(self, model, tokens=64, shape=RAGGED):
        return model.step_ms(FULL, shape, 0, tokens)[1]

    def test_a_slower_machine_raises_all_prices_of_the_mode(self):
        """Only one cell is visited: were the others left behind, the planner would flee to them."""
        model = self.model()
        before = {size: self.price(model, size) for size in (8, 128)}
        for _ in range(800):
            model.observe(timing(64, 1.3 * (5.0 + 0.02 * 64)))
        assert self.price(model) == pytest.approx(1.3 * (5.0 + 0.02 * 64), rel=0.02)
        for size, ms in before.items():
            assert self.price(model, size) > 1.07 * ms
        assert self.price(model, 64, NATIVE) > 1.07 * (5.0 + 0.02 * 64)

    @pytest.mark.parametrize("bad", [1e9, float("nan"), float("inf"), 0.0, -3.0])
    def test_one_broken_measurement_moves_almost_nothing(self, bad):
        model = self.model()
        before = self.price(model)
        model.observe(timing(64, bad, draft=bad))
        for _ in range(20):
            model.observe(timing(64, before))
        assert self.price(model) == pytest.approx(before, rel=0.02)
        assert model.draft_ms(4) == pytest.approx(0.3, rel=0.05)

    @pytest.mark.parametrize(("factor", "sign"), [(1e6, 1), (1e-6, -1)])
    def test_corrections_are_bounded(self, factor, sign):
        model = self.model()
        before = self.price(model)
        for _ in range(5_000):
            model.observe(timing(64, before * factor))
        limit = before * np.exp(sign * (BOUND_MODE + BOUND_CELL))
        assert np.sign(np.log(self.price(model) / before)) == sign
        assert sign * np.log(self.price(model) / limit) <= 1e-9

    def test_drift_is_reported_and_can_be_persisted(self):
        model = self.model()
        assert model.drift(0.25) == []
        for _ in range(600):
            model.observe(timing(64, 2.0 * (5.0 + 0.02 * 64), draft=0.3))
        worst = model.drift(0.25)[0]
        assert (worst.grid, worst.size) == ("full/ragged", 64)
        assert worst.ratio == pytest.approx(2.0, rel=0.05)
        assert all(item.grid != "draft" for item in model.drift(0.25))
        again = CostModel(model.corrected_table())
        assert self.price(again) == pytest.approx(self.price(model))
        assert again.drift(0.25) == []

    def test_switched_off_it_stays_with_the_table(self):
        model = CostModel(self.model().table, online=False)
        before = self.price(model)
        for _ in range(100):
            model.observe(timing(64, 100.0))
        assert self.price(model) == before
