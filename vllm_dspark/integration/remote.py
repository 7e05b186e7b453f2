"""The door through which the measuring commands reach an engine's workers.

`OfflineEngine.call` reaches `MeasuringWorker.dspark_call` on every rank through vLLM's
`collective_rpc`. Arguments and results are JSON text: vLLM's codec carries text unchanged, while
objects would need its insecure serialization. Ranks run the same methods in the same order, so
that steps with collectives match; only the output rank answers.
"""

from __future__ import annotations

import json
from typing import Any

from vllm_dspark.errors import DSparkError


class MeasuringWorker:
    """Mixin of our workers: answers the measuring commands."""

    model_runner: Any

    def dspark_call(self, method: str, arguments: str) -> str | None:
        """JSON of a method's result, or of its error, on the output rank; None on the others.

        {"value": ...} or {"error": message}; errors other than ours are vLLM's to report.
        """
        # Imported at use: serving never comes here.
        from vllm.distributed.parallel_state import get_tp_group

        from vllm_dspark.integration.measuring import METHODS

        try:
            answer = {"value": METHODS[method](self.model_runner, *json.loads(arguments))}
        except DSparkError as error:
            answer = {"error": str(error)}
        has_drafter = getattr(self.model_runner, "speculator", None) is not None
        return json.dumps(answer) if has_drafter and get_tp_group().rank_in_group == 0 else None
