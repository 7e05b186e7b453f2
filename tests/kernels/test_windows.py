"""Device allocation against the numpy oracle, equal bit for bit."""

import numpy as np
import pytest
import torch

from vllm_dspark.kernels.windows import (
    WindowBuffers,
    WindowCalibration,
    WindowRequests,
    allocate_windows,
)
from vllm_dspark.planning.allocation import allocate, ragged_layout
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.survival import acceptance, survival

SLOTS = 1100


class Step:
    """Random requests; `padding` rows follow the real ones."""

    def __init__(self, num_reqs, width, seed, *, padding=0, levels=None):
        rng = np.random.default_rng(seed)
        self.n, self.width, self.padded = num_reqs, width, num_reqs + padding
        self.confidence = rng.random((SLOTS, width), dtype=np.float32)
        if levels:
            self.confidence = (np.round(self.confidence * levels) / levels).astype(np.float32)
        self.prior = rng.random((SLOTS, width), dtype=np.float32)
        self.slot = rng.permutation(SLOTS)[: self.padded].astype(np.int64)
        self.usable = (rng.random(self.padded) < 0.8).astype(np.int32)
        self.drafts = rng.integers(0, width + 1, self.padded).astype(np.int32)
        self.rows = self.drafts + 1 + rng.integers(0, 3, self.padded).astype(np.int32)
        self.rows[num_reqs:] = 0
        self.capacity = rng.integers(0, self.drafts + 1).astype(np.int32)
        self.floor = rng.integers(0, self.capacity + 1).astype(np.int32)
        self.floor[rng.random(self.padded) < 0.7] = 0
        self.sampled = rng.random(SLOTS) < 0.5

    def oracle(self, budget, calibration=None):
        n = self.n
        conditional, invalid = acceptance(
            self.confidence[self.slot[:n]].T.copy(),
            self.usable[:n].astype(bool),
            self.prior[self.slot[:n]].T.copy(),
            calibration or Calibration.identity(self.width),
            self.sampled[self.slot[:n]],
        )
        admitted = allocate(survival(conditional), self.capacity[:n], self.floor[:n], budget)
        layout = ragged_layout(admitted, self.drafts[:n], self.rows[:n], self.padded)
        return admitted, layout, invalid

    def device(self, budget, device, calibration=None):
        def tensor(array):
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        max_rows = int(self.rows.sum()) + 9
        out = WindowBuffers.empty(self.padded, max_rows, max_rows, device)
        for name in ("admitted", "windows", "query_start_loc", "cu_num_logits", "source_rows"):
            getattr(out, name).fill_(-77)
        out.logits_rows.fill_(-77)
        parameters = None
        if calibration is not None:
            parameters = WindowCalibration(
                tensor(self.sampled.astype(np.float32)),
                tensor(calibration._slope[:, :, 0]),
                tensor(calibration._offset[:, :, 0]),
            )
        requests = WindowRequests(
            *map(
                tensor,
                (self.slot, self.usable, self.drafts, self.rows, self.capacity, self.floor),
            )
        )
        allocate_windows(
            out,
            tensor(self.confidence),
            tensor(self.prior),
            requests,
            torch.tensor([budget], dtype=torch.int32, device=device),
            parameters,
        )
        return {name: getattr(out, name).cpu().numpy() for name in WindowBuffers.__slots__}

    def check(self, budget, device):
        admitted, layout, invalid = self.oracle(budget)
        out = self.device(budget, device)
        n = self.n
        np.testing.assert_array_equal(out["admitted"][:n], admitted)
        assert not out["admitted"][n:].any()
        np.testing.assert_array_equal(out["windows"][:n], layout.windows)
        np.testing.assert_array_equal(out["query_start_loc"], layout.query_start_loc)
        np.testing.assert_array_equal(out["cu_num_logits"][: n + 1], layout.cu_num_logits)
        assert (out["cu_num_logits"][n:] == layout.cu_num_logits[-1]).all()
        rows, logits = layout.source_rows, layout.logits_rows
        np.testing.assert_array_equal(out["source_rows"][: rows.size], rows)
        assert not out["source_rows"][rows.size :].any()
        np.testing.assert_array_equal(out["logits_rows"][: logits.size], logits)
        assert not out["logits_rows"][logits.size :].any()
        assert out["counters"].tolist() == [invalid, budget]

    def budgets(self):
        least, most = int(self.floor[: self.n].sum()), int(self.capacity[: self.n].sum())
        return sorted({least, most, (least + most) // 2, min(least + 1, most)})


@pytest.mark.parametrize(
    ("num_reqs", "width"), [(1, 1), (1, 7), (3, 8), (37, 7), (130, 5), (9, 16)]
)
@pytest.mark.parametrize("padding", [0, 5])
def test_equals_the_oracle(num_reqs, width, padding, device):
    step = Step(num_reqs, width, seed=num_reqs * 31 + width, padding=padding)
    for budget in step.budgets():
        step.check(budget, device)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_ties_go_by_position_then_request(levels, device):
    """Few distinct confidences: most keys tie, 0 and 1 among them."""
    step = Step(50, 8, seed=levels, padding=3, levels=levels)
    least, most = int(step.floor[:50].sum()), int(step.capacity[:50].sum())
    for budget in range(least, most + 1, 7):
        step.check(budget, device)


def test_not_probabilities_are_neutral(device):
    """NaN, infinities and out-of-range values become the prior and are counted; -0.0 is zero."""
    step = Step(40, 6, seed=5)
    bad = np.array([np.nan, np.inf, -np.inf, -0.5, 1.5, -0.0, 0.0, 1.0], dtype=np.float32)
    picks = np.random.default_rng(1).integers(0, len(bad) * 2, step.confidence.shape)
    step.confidence = np.where(picks < len(bad), bad[picks % len(bad)], step.confidence)
    for budget in step.budgets():
        step.check(budget, device)


def test_budget_is_clamped(device):
    step = Step(6, 4, seed=2)
    least, most = step.budgets()[0], step.budgets()[-1]
    assert step.device(10_000, device)["counters"][1] == most
    assert step.device(-5, device)["counters"][1] == least
    np.testing.assert_array_equal(step.device(10_000, device)["admitted"], step.capacity)


def test_largest_step(device):
    step = Step(512, 8, seed=11)
    step.check(step.budgets()[1], device)


def test_calibrated_ranking(device):
    """With calibration on, the device's exp may move a tie by an ulp; the gain may not change."""
    step = Step(60, 5, seed=8)
    calibration = Calibration((0.7, 1.3, 2.0, 1.0, 0.9), (1.5, 1.1, 0.8, 1.2, 1.0))
    budget = step.budgets()[1]
    admitted, _, _ = step.oracle(budget, calibration)
    found = step.device(budget, device, calibration)["admitted"]
    assert found.sum() == budget
    assert (found != admitted).mean() < 0.05
