"""Stand-ins for measuring engines, importable by Ray's workers."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from tests.artifacts.records import fingerprint
from tests.support.patience import PATIENCE_S
from vllm_dspark.artifacts.pairs import Pair
from vllm_dspark.artifacts.schema import CalibrationRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.cli.replicas import PairsOfTask

K = 7


def description(**changes):
    return {
        "fingerprint": fingerprint().model_dump(mode="json"),
        "cache_dir": changes.pop("cache_dir", ""),
        "windows": "host",
        "unused_because": "",
        "num_speculative_tokens": K,
        "model": "TARGET",
        "drafter": "DRAFTER",
        "replica": f"here:{os.getpid()}",
        **changes,
    }


class FakeProfile:
    """Times of a machine with a known cost; `noise` is the range of what else runs on it."""

    noise = 0.0
    saved: str | None = None

    def __init__(self, arguments):
        self.arguments = arguments
        self.rng = np.random.default_rng(0)

    def describe(self):
        return description()

    def cells(self, full):
        sizes = (1, 2, 4, 8, 16, 32, 64) if full else (1, 4, 16, 64)
        return [
            {"num_tokens": n, "kv_tokens": kv, "num_requests": max(1, n // 8)}
            for n in sizes
            for kv in (128, 1024)
        ]

    def allocation_ms(self):
        return 0.25

    def run(self, task):
        samples = []
        for cell in task:
            factor = 1.0 + self.noise * self.rng.random()
            times = {
                "forward_ms": (10.0 + cell["num_tokens"] + cell["kv_tokens"] / 256) * factor,
                "draft_ms": (2.0 + cell["num_requests"]) * factor,
            }
            samples.append({**cell, **times})
        return {"samples": samples, "replica": f"here:{os.getpid()}"}

    def save(self, record):
        type(self).saved = record
        return "/cache/cost-table.json"

    def close(self):
        pass


class FakeCalibration:
    """Drafts of a head that is too sure of itself: true logit = half of what it says.

    What a prompt brings depends on its index and temperature alone, so that any number of
    replicas must bring the same. While `folder/kill` exists, the replica that takes it away dies
    in the middle of its task.
    """

    def __init__(self, arguments, chat):
        self.folder = Path(arguments[0]) if arguments else None

    def describe(self):
        return description(cache_dir=str(self.folder))

    def run(self, task, finished=None):
        pairs = []
        for number, request in enumerate(task):
            if self.folder is not None and number == len(task) // 2:
                self._die_if_told()
            pairs += [(request.prompt, pair) for pair in self.pairs_of(request)]
            if finished is not None:
                finished(len(pairs))
        return PairsOfTask(tuple(pairs), len(pairs), ())

    def _die_if_told(self):
        try:
            (self.folder / "kill").unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE_S)

    @staticmethod
    def pairs_of(request, rows=100):
        rng = np.random.default_rng((request.prompt, int(request.temperature * 10)))
        z = rng.normal(1.0, 2.0, (rows, K))
        hit = rng.random((rows, K)) < 1.0 / (1.0 + np.exp(-z / 2.0))
        accepted = np.cumprod(hit, axis=1).sum(axis=1)
        return [
            Pair(
                request_id=f"{request.prompt}/{request.temperature}",
                sampled=request.temperature > 0,
                untouched=True,
                stamp=row + 1,
                verified=K,
                accepted=int(accepted[row]),
                confidence=tuple((1.0 / (1.0 + np.exp(-z[row]))).tolist()),
            )
            for row in range(rows)
        ]

    def save(self, record):
        made = CalibrationRecord.model_validate_json(record)
        return str(ArtifactStore(self.folder).save(made))

    def close(self):
        pass


class Broken:
    """A replica that refuses its work, or dies at once."""

    def __init__(self, how):
        self.how = how

    def describe(self):
        return description(replica=self.how)

    def run(self, task):
        from vllm_dspark.errors import InputError

        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InputError(f"cannot do {task}")
