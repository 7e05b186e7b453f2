"""Which cells are measured again, and when a table is refused."""

import random

import pytest

from vllm_dspark.errors import CostTableError
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.measuring import Cell, CellSamples, rounds_of

CELLS = [Cell(tokens, kv, 1 + tokens // 8) for tokens in (1, 2, 4, 8, 16, 32) for kv in (128, 1024)]


def timing(cell, factor=1.0):
    return StepTiming(
        StepMode.EAGER,
        StepShape.RAGGED,
        num_requests=cell.num_requests,
        num_tokens=cell.num_tokens,
        kv_tokens=cell.kv_tokens,
        forward_ms=(5.0 + cell.num_tokens + cell.kv_tokens / 1024) * factor,
        draft_ms=2.0 * factor,
    )


def measured(noise, rounds=30, **options):
    """Samples after rounds in which `noise(round, cell)` scales the times; rounds that ran."""
    samples = CellSamples(CELLS, **{"repeats": 5, "max_spread": 0.1, **options})
    for number in range(rounds):
        todo = samples.unsettled()
        if not todo:
            return samples, number
        samples.add(timing(cell, noise(number, cell)) for cell in todo)
    return samples, rounds


def test_quiet_machine_needs_no_more_than_its_repeats():
    """Catches work beyond what was asked for."""
    samples, rounds = measured(lambda *_: 1.0)
    assert rounds == 5
    assert samples.num_samples == 5 * len(CELLS)
    assert samples.missing() == 0
    grid = samples.table().grids[StepMode.EAGER, StepShape.RAGGED]
    assert grid.sizes == (1, 2, 4, 8, 16, 32)
    assert grid.median_ms[0, 0] == pytest.approx(6.125)


def test_passing_disturbance_costs_only_the_cells_it_hit():
    """Catches a table made of disturbed samples, and a new start of everything."""
    hit = CELLS[:4]
    samples, rounds = measured(lambda n, cell: 3.0 if n in (3, 4) and cell in hit else 1.0)
    assert 5 < rounds < 12
    assert samples.num_samples == 5 * len(CELLS) + (rounds - 5) * len(hit)
    assert samples.table().grids[StepMode.EAGER, StepShape.RAGGED].median_ms[0, 0] == 6.125


def test_lasting_noise_is_refused():
    """Catches a noisy machine whose table ranks budgets by chance."""
    rng = random.Random(0)
    samples, rounds = measured(lambda *_: rng.uniform(1.0, 2.0))
    assert rounds == 30
    with pytest.raises(CostTableError, match="kinds of step scatter by more than 10%") as caught:
        samples.table()
    assert caught.value.reason == "noisy"


def test_one_cell_that_never_settles_is_no_reason():
    """Catches one busy corner holding up the rest for ever."""
    noisy = CELLS[5]
    rng = random.Random(0)
    samples, _ = measured(lambda _, cell: rng.uniform(1, 4) if cell == noisy else 1.0)
    assert samples.unsettled() == [noisy]
    samples.table()


def test_too_few_samples_are_not_a_table():
    """Catches a time limit that strikes early."""
    samples, _ = measured(lambda *_: 1.0, rounds=2)
    with pytest.raises(CostTableError, match=r"time was up .* fewer than"):
        samples.table()


def test_foreign_samples_are_refused():
    """Catches samples of another plan counted under a cell."""
    samples = CellSamples(CELLS, 3, 0.1)
    with pytest.raises(CostTableError, match="nobody asked"):
        samples.add([timing(Cell(3, 128, 1))])


@pytest.mark.parametrize("size", [1, 5, 100])
def test_rounds_hold_every_cell_once(size):
    """Catches cells lost or doubled at the edge of a portion."""
    assert [cell for portion in rounds_of(CELLS, size) for cell in portion] == CELLS
