"""Settings of every test process, and the tiny model pairs that engine tests share."""

import logging
import os
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.support.engines import ENGINE_ENVIRONMENT
from tests.support.patience import PATIENT_ENVIRONMENT
from tests.support.recorder import (  # noqa: F401 - hooks of this suite
    pytest_addoption,
    pytest_runtest_logreport,
    pytest_sessionfinish,
)

os.environ.update(ENGINE_ENVIRONMENT)  # before torch and numba are imported
os.environ.update(PATIENT_ENVIRONMENT)
# Cost tables measured by one session must not serve the next one, nor a user's engines.
os.environ["VLLM_DSPARK_CACHE_DIR"] = tempfile.mkdtemp(prefix="vllm-dspark-tests-")

# How fast examples are made and run says something about the machine, not about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Files of few and long tests, longest first. They begin the session (with the Makefile's
# --no-loadscope-reorder): left to the end, one worker would work on them alone for minutes.
_LONG_FILES = (
    "tests/integration/test_ray_serving.py",
    "tests/formats/test_engine_drafts.py",
    "tests/formats/test_targets.py",
    "tests/integration/test_tensor_parallel.py",
    "tests/integration/test_ray_executor.py",
    "tests/integration/test_metrics_server.py",
    "tests/integration/test_measuring_commands.py",
    "tests/test_docs.py",
    "tests/cli/test_serve_http.py",
    "tests/bench/test_engine.py",
    "tests/kernels/test_cross_compile.py",
    "tests/kernels/test_rejection.py",
    "tests/simulation/test_fast_planner.py",
    "tests/integration/test_register.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order of all other tests stays."""
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Build a pair of a spec once per session: `pair = build(PairSpec(kind="markov"))`."""
    from tests.support.pairs import Pair, PairSpec, build_pair

    built: dict[PairSpec, Pair] = {}

    def get(spec: PairSpec) -> Pair:
        if spec not in built:
            built[spec] = build_pair(tmp_path_factory.mktemp(f"{spec.kind}-pair"), spec)
        return built[spec]

    return get


def pytest_configure() -> None:
    """Torch's structured trace writes megabytes of empty debug records into captured logs."""
    logging.getLogger("torch.__trace").propagate = False
