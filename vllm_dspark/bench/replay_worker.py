"""What `--replay` adds to vLLM's workers: named by the engine argument `worker_extension_cls`.

vLLM makes the class a base of its worker's, stock or ours, in whatever process that worker runs,
and calls its methods by name (`collective_rpc`) on every rank with plain strings. So an engine core
in a process of its own, and every rank of it, replays exactly as one in this process does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_dspark.bench.recorded import recorded_steps
from vllm_dspark.integration.replay import install_replay


class ReplayWorker:
    """Base that a worker of a replayed engine gets; its names must be none of a worker's."""

    model_runner: Any  # of the worker

    def dspark_replay(self, trace: str) -> None:
        """Repeat this trace from now on; raises TraceError or EngineError where that cannot be.

        Which recorded request a request repeats stands in its id (replay.request_mark), so nothing
        more has to be said to the workers.
        """
        install_replay(self.model_runner, recorded_steps(Path(trace)))
