"""One measuring engine, used in this process or, by `--ray`, as an actor in many."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.pairs import Pair, PairReader
from vllm_dspark.artifacts.schema import CalibrationRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.integration.offline import Content, OfflineEngine, TokenPrompt


@dataclass(frozen=True)
class Request:
    """One prompt at one temperature. `prompt`: index of the prompt; content: text or messages."""

    prompt: int
    content: Content
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class PairsOfTask:
    """What one task brought: pairs by prompt, tokens generated, prompts too long for the model."""

    pairs: tuple[tuple[int, Pair], ...]
    num_tokens: int
    too_long: tuple[int, ...]


class ProfileReplica:
    """Times kinds of step."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # Off, or the start would look for a cost table, or measure one, by itself.
        self._engine = OfflineEngine(arguments, {"scheduling": False, "metrics": False})
        self._name = _name()

    def describe(self) -> dict[str, Any]:
        """What `integration/measuring.describe` says, and who says it."""
        return {**self._engine.call("describe"), "replica": self._name}

    def cells(self, full: bool) -> list[dict[str, int]]:
        """Kinds of step to time; warms all of them up."""
        found: list[dict[str, int]] = self._engine.call("profile_cells", full)
        return found

    def allocation_ms(self) -> float:
        """Time of handing out a budget inside a step."""
        return float(self._engine.call("profile_allocation"))

    def run(self, task: list[dict[str, int]]) -> dict[str, Any]:
        """One sample of each cell of the task."""
        return {"samples": self._engine.call("profile_measure", task), "replica": self._name}

    def save(self, record: str) -> str:
        """Keep a cost table in the cache of this machine."""
        return str(self._engine.call("profile_save", record))

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.close()


class CalibrationReplica:
    """Runs prompts at full windows and raw confidences, and brings what became of the drafts."""

    def __init__(self, arguments: Sequence[str], chat: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-dspark-pairs-")
        path = Path(self._folder.name) / "pairs.jsonl"
        self._chat = chat
        # Without scheduling every window is full and no temperature is applied to anything.
        self._engine = OfflineEngine(
            arguments,
            {"scheduling": False, "metrics": False, "record_confidences": str(path)},
        )
        self._reader = PairReader(path)
        self._name = _name()

    def describe(self) -> dict[str, Any]:
        """What `integration/measuring.describe` says, and who says it."""
        return {**self._engine.call("describe"), "replica": self._name}

    def run(
        self, task: Sequence[Request], finished: Callable[[int], None] | None = None
    ) -> PairsOfTask:
        """Generate for all requests of the task; finished: told the tokens of each as it ends."""
        prompts, too_long = [], []
        for number, request in enumerate(task):
            tokens = self._engine.encode(request.content, chat=self._chat)
            if len(tokens) > self._engine.max_prompt_tokens:
                too_long.append(request.prompt)
                continue
            name = f"{number}/{request.prompt}"
            prompts.append(TokenPrompt(name, tokens, request.temperature, request.max_tokens))
        num_tokens = 0
        for _, count in self._engine.run(prompts):
            num_tokens += count
            if finished is not None:
                finished(count)
        # vLLM appends a random part to request ids.
        pairs = [
            (int(pair.request_id.split("/")[1].split("-")[0]), pair) for pair in self._reader.read()
        ]
        return PairsOfTask(tuple(pairs), num_tokens, tuple(too_long))

    def save(self, record: str) -> str:
        """Keep a calibration in the cache of this machine."""
        store = ArtifactStore(Path(self._engine.call("describe")["cache_dir"]))
        return str(store.save(CalibrationRecord.model_validate_json(record)))

    def close(self) -> None:
        """Shut the engine down and drop its recording."""
        self._engine.close()
        self._folder.cleanup()


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
