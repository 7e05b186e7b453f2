"""The CUDA executor of trim plans against the CPU one, on the same orders."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.conftest import DEVICE
from vllm_dspark.errors import DSparkError
from vllm_dspark.integration import cuda_windows
from vllm_dspark.integration.cuda_windows import CudaWindows
from vllm_dspark.integration.device_windows import DeviceWindows, HostTensorWindows
from vllm_dspark.integration.report import StepOrder
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, owner_id, request_digest
from vllm_dspark.planning.table import RankingParameters

WIDTH, SLOTS = 5, 20
ALONE = SimpleNamespace(world_size=1)


def runner(device: str) -> Any:
    """What an executor looks at in vLLM's runner."""
    return SimpleNamespace(
        device=torch.device(device),
        num_speculative_steps=WIDTH,
        max_num_reqs=SLOTS,
        speculator=SimpleNamespace(confidence_logits=torch.zeros(SLOTS, WIDTH, device=device)),
        input_buffers=SimpleNamespace(
            query_start_loc=torch.full((SLOTS + 1,), 77, dtype=torch.int32, device=device)
        ),
        req_states=SimpleNamespace(req_id_to_index={}),
        sampler=SimpleNamespace(
            sampling_states=SimpleNamespace(
                temperature=SimpleNamespace(gpu=torch.zeros(SLOTS, device=device))
            )
        ),
        dspark_batch_ids=[],
    )


class Scene:
    """One step of some requests, prepared by both executors."""

    def __init__(self, seed: int, num_reqs: int) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.ids = [f"r{i}" for i in range(num_reqs)]
        self.slots = rng.permutation(SLOTS)[:num_reqs]
        self.num_drafts = rng.integers(1, WIDTH + 1, num_reqs).astype(np.int32)
        self.num_rows = self.num_drafts + 1
        self.logits = rng.normal(size=(num_reqs, WIDTH)).astype(np.float32)
        self.temperature = rng.choice([0.0, 0.7], SLOTS).astype(np.float32)
        self.sampled = {n for n, s in zip(self.ids, self.slots, strict=True) if self.temperature[s]}
        self.stamps = dict.fromkeys(self.ids, 4)

    def order(self, budget: int, **changes: Any) -> StepOrder:
        owners = np.array([owner_id(name) for name in self.ids])
        plan = VerifyPlan(
            step_id=5,
            digest=request_digest(owners),
            num_requests=len(self.ids),
            num_positions=WIDTH,
            kind=PlanKind.TRIM,
            reason=Reason.TRIM_GAIN,
            budget=budget,
            padded_tokens=0,
            draft_next=True,
            windows=changes.pop("windows", ()),
            predicted_ms=0.0,
            predicted_tokens=0.0,
            native_ms=0.0,
            native_tokens=0.0,
        )
        calibration = Calibration(
            greedy=(1.5, 1.2, 1.0, 0.8, 0.7), sampled=(0.6, 0.9, 1.0, 1.4, 2.0)
        ).with_offsets(np.linspace(-0.3, 0.4, 2 * WIDTH).reshape(2, WIDTH))
        prior = np.array([[0.71, 0.6, 0.5, 0.4, 0.3], [0.55, 0.45, 0.35, 0.25, 0.15]], np.float32)
        return StepOrder(
            5,
            plan,
            self.ids,
            self.num_drafts,
            np.array([self.stamps[name] for name in self.ids], dtype=np.int32),
            RankingParameters(calibration, prior),
            frozenset(self.sampled),
            **changes,
        )

    def run(self, kind: type[DeviceWindows], order: StepOrder) -> tuple[Any, ...]:
        device = DEVICE if kind is CudaWindows else "cpu"
        host = runner(device)
        host.req_states.req_id_to_index = dict(zip(self.ids, self.slots.tolist(), strict=True))
        host.dspark_batch_ids = self.ids
        host.sampler.sampling_states.temperature.gpu.copy_(torch.from_numpy(self.temperature))
        windows = kind(host, ALONE)
        # The pass that drafted had its own batch order.
        order_then = np.arange(len(self.ids))[::-1]
        rows = torch.from_numpy(self.logits[order_then].copy()).to(device)
        host.speculator.confidence_logits[: len(self.ids)].copy_(rows)
        windows.record(4, self.slots[order_then], rows)
        owners = np.array([owner_id(name) for name in self.ids])
        assert windows.accept(order, owners), windows.box.last_mismatch
        drafts = {n: [0] * int(d) for n, d in zip(self.ids, self.num_drafts, strict=True)}
        rows_of = dict(zip(self.ids, self.num_rows.tolist(), strict=True))
        num_tokens = windows.get_num_tokens(rows_of, drafts)
        cu = np.append(0, np.cumsum(self.num_rows)).astype(np.int32)
        lengths, _ = windows.compact_batch(self.num_drafts, self.num_rows, cu)
        mapping = torch.from_numpy(self.slots.astype(np.int64)).to(device)
        logits, starts, budget = windows.reallocate_drafts(self.ids, mapping)
        assert lengths.sum() == num_tokens
        assert (lengths >= self.num_rows - self.num_drafts).all()
        assert (lengths <= self.num_rows).all()
        return windows.admitted()().by_name(), logits.tolist(), starts.tolist(), budget, num_tokens


@pytest.mark.parametrize("seed", range(6))
def test_both_executors_agree(seed: int) -> None:
    """Catches a row of the wrong pass or slot, a calibration of the wrong class, a stray limit."""
    scene = Scene(seed, num_reqs=(1, 2, 7, 16, 17, 20)[seed])
    total = int(scene.num_drafts.sum())
    scene.stamps[scene.ids[-1]] = 3  # drafted by a pass whose row is gone
    ceilings = {scene.ids[0]: int(scene.num_drafts[0]) - 1}
    floors = {scene.ids[len(scene.ids) // 2]: WIDTH}
    for budget in {0, total // 3, total // 2, total - 1, total}:
        order = scene.order(budget, ceilings=ceilings, floors=floors)
        ours, theirs = (scene.run(k, order) for k in (CudaWindows, HostTensorWindows))
        assert ours == theirs, budget
        admitted, logits, starts, verified, num_tokens = ours
        assert sum(admitted.values()) == verified == budget
        assert starts[len(scene.ids)] == num_tokens
        assert set(starts[len(scene.ids) :]) == {num_tokens}
        assert logits[-1] == len(scene.ids) + budget


@pytest.mark.parametrize("seed", range(3))
def test_given_windows_are_executed(seed: int) -> None:
    """Catches prescribed windows that are ranked after all."""
    scene = Scene(seed, num_reqs=9)
    wanted = np.minimum(scene.rng.integers(0, WIDTH + 1, 9), scene.num_drafts)
    order = scene.order(int(wanted.sum()), windows=tuple((wanted + 1).tolist()))
    for kind in (CudaWindows, HostTensorWindows):
        admitted, *_ = scene.run(kind, order)
        assert admitted == dict(zip(scene.ids, wanted.tolist(), strict=True))


def test_a_nan_row_moves_nothing() -> None:
    """Catches NaN sorting to the front: its position counts as the prior."""
    scene = Scene(3, num_reqs=6)
    scene.logits[2] = np.nan
    order = scene.order(int(scene.num_drafts.sum()) // 2)
    ours, theirs = (scene.run(k, order) for k in (CudaWindows, HostTensorWindows))
    assert ours == theirs


def test_a_new_owner_is_neutral() -> None:
    """Catches the confidences of a slot's previous request ranking its next one."""
    scene = Scene(1, num_reqs=4)
    order = scene.order(int(scene.num_drafts.sum()) // 2)
    before = scene.run(CudaWindows, order)
    scene.stamps = dict.fromkeys(scene.ids, 3)
    neutral = scene.run(CudaWindows, scene.order(order.plan.budget))
    scene.logits[:] = 0.0
    assert scene.run(CudaWindows, scene.order(order.plan.budget)) == neutral
    assert before[1] != neutral[1]


def test_start_up_check_passes_and_notices_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that accepts whatever the kernel does, and one that disturbs the engine."""
    host = runner(DEVICE)
    logits = torch.linspace(-1, 1, SLOTS * WIDTH, device=DEVICE).view(SLOTS, WIDTH)
    host.speculator.confidence_logits.copy_(logits)
    CudaWindows(host, ALONE).check()
    assert torch.equal(host.speculator.confidence_logits, logits)
    allocate = cuda_windows.allocate_windows

    def upside_down(out: Any, confidence: torch.Tensor, *args: Any) -> None:
        allocate(out, -confidence, *args)

    monkeypatch.setattr(cuda_windows, "allocate_windows", upside_down)
    with pytest.raises(DSparkError, match="left out"):
        CudaWindows(host, ALONE).check()
