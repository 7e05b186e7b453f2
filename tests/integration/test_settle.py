"""What a DSpark start becomes: options, worker, scheduler, hash, and when the plugin is off."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import engine_args, make_config
from tests.support.engines import DEFAULTS, dspark
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration import compat, settle
from vllm_dspark.integration.carrier import options_of

pytestmark = pytest.mark.usefixtures("runner_choice")

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
OURS = (compat.CPU_WORKER, settle.SCHEDULER)


def _classes(config: Any) -> tuple[str, Any]:
    return config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls


def test_stock_config_works_with_defaults(pair: Any) -> None:
    """Catches options that a plain `{"method": "dspark", "model": ...}` would have to name."""
    speculative = {"method": "dspark", "model": str(pair.drafter)}
    config = engine_args(pair.target, speculative).create_engine_config()
    assert _classes(config) == OURS
    assert options_of(config) == DSparkConfig()
    assert config.speculative_config.num_speculative_tokens == pair.spec.block_size


def test_options_arrive(pair: Any) -> None:
    """Catches options lost between the speculative config and the workers."""
    given = {"windows": "host", "request_floor": 2, "test_windows": [1, 8], "scheduling": "auto"}
    config = make_config(pair, given)
    assert options_of(config) == DSparkConfig.from_mapping(given)


def test_users_dict_is_left_alone(pair: Any) -> None:
    """Catches a caller's own dict losing its "dspark" object."""
    given = dspark(pair.drafter, {"windows": "host"}, num_speculative_tokens=7)
    before = copy.deepcopy(given)
    engine_args(pair.target, given).create_engine_config()
    assert given == before


@pytest.mark.parametrize(
    "options, words",
    [
        ({"windos": "host"}, ["dspark.windos", "'host'", "did you mean 'windows'?"]),
        ({"windows": "gpu"}, ["dspark.windows", "'gpu'", '"auto", "host" or "device"']),
        ({"request_floor": "2"}, ["dspark.request_floor", "'2'", "an integer from 0"]),
        ({"probe_interval": 1}, ["dspark.probe_interval", "1", "an integer from 2"]),
        ({"request_floor": 9}, ["dspark.request_floor", "9", "num_speculative_tokens = 7"]),
        ({"test_windows": [3, 9]}, ["dspark.test_windows", "9", "allowed: 1 to 8"]),
        ({"enabled": "yes"}, ["dspark.enabled", "'yes'", "true or false"]),
        ({"record_outcomes": "/dev/null/x"}, ["dspark.record_outcomes", "leave the option out"]),
        ("host", ["must be a JSON object", "'host'", '"dspark": {']),
    ],
)
def test_wrong_options_are_refused(pair: Any, options: Any, words: list[str]) -> None:
    """Catches a wrong option that is ignored, or an error without cause, value or remedy."""
    with pytest.raises(DSparkConfigError) as caught:
        make_config(pair, options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("method", ["ngram", None])
def test_options_with_another_method_are_refused(pair: Any, method: str | None) -> None:
    """Catches a "dspark" object that silently does nothing."""
    speculative: dict[str, Any] = {"dspark": {}, "num_speculative_tokens": 3}
    speculative |= {"method": method} if method else {"model": str(pair.target)}
    with pytest.raises(ValueError) as caught:
        engine_args(pair.target, speculative).create_engine_config()
    if method is not None:
        assert "'ngram'" in str(caught.value)
        assert '"method": "dspark"' in str(caught.value)


def test_disabled_gives_stock_classes(pair: Any) -> None:
    """Catches a switched-off plugin that still sets a class or leaves options behind."""
    config = make_config(pair, {"enabled": False})
    assert _classes(config) == (STOCK_WORKER, None)
    assert options_of(config) is None
    assert not config.additional_config


@pytest.mark.parametrize("options", [None, {"windows": "host"}, {"enabled": False}])
def test_second_config_from_the_same_arguments(pair: Any, options: Any) -> None:
    """Catches options that only the first config of an EngineArgs sees (vLLM builds several)."""
    speculative = dspark(pair.drafter, options, num_speculative_tokens=7)
    args = engine_args(pair.target, speculative)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert _classes(second) == _classes(first)
    assert options_of(second) == options_of(first)


def test_plain_engine_first_does_not_prevent_dspark(pair: Any) -> None:
    """Catches the V1 pin of a plain start staying behind in the process for a DSpark start."""
    engine_args(pair.target).create_engine_config()
    config = make_config(pair)
    assert _classes(config) == OURS
    assert config.use_v2_model_runner


def test_plain_start_stays_as_it_was(pair: Any) -> None:
    """Catches any trace of the plugin in a start without DSpark, after one with it."""
    make_config(pair)
    config = engine_args(pair.target).create_engine_config()
    assert _classes(config) == (STOCK_WORKER, None)
    assert not config.additional_config
    assert not config.use_v2_model_runner


def test_users_classes_are_kept(pair: Any, plugin_warnings: Callable) -> None:
    """Catches a user's worker or scheduler replaced, or kept without saying what is off."""
    worker = "tests.integration.test_settle.SomeWorker"
    scheduler = "vllm.v1.core.sched.scheduler.Scheduler"
    config = make_config(pair, worker_cls=worker, scheduler_cls=scheduler)
    assert _classes(config) == (worker, scheduler)
    kept = plugin_warnings()
    assert len(kept) == 2, kept
    assert any(f"worker_cls={worker}" in line and "are off" in line for line in kept)
    assert any(f"scheduler_cls={scheduler}" in line and "are off" in line for line in kept)


def test_additional_config_of_the_user_is_kept(pair: Any) -> None:
    """Catches other plugins' settings overwritten by ours."""
    mine = {"other": {"x": 1}}
    config = make_config(pair, {"windows": "host"}, additional_config=mine)
    assert config.additional_config["other"] == {"x": 1}
    assert options_of(config).windows == "host"
    assert mine == {"other": {"x": 1}}


def test_options_do_not_change_the_compile_hash(pair: Any) -> None:
    """Catches tuning options that make vLLM compile anew; a real difference must still count."""
    default = make_config(pair).compute_hash()
    tuned = make_config(pair, {"hysteresis_steps": 9, "windows": "host"}).compute_hash()
    assert tuned == default
    other = make_config(pair, max_num_batched_tokens=256).compute_hash()
    assert other != default


def test_options_survive_pickling(pair: Any) -> None:
    """Catches options that do not reach an engine core or worker in another process."""
    config = make_config(pair, {"request_floor": 3, "record_outcomes": "/tmp/x.jsonl"})
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert options_of(copied) == options_of(config)
        assert options_of(copied).request_floor == 3


def test_method_may_be_left_out(pair: Any) -> None:
    """Catches a drafter that vLLM recognises but the plugin does not: V1 pinned, no engine."""
    speculative = {"model": str(pair.drafter), "num_speculative_tokens": 7}
    config = engine_args(pair.target, speculative).create_engine_config()
    assert config.speculative_config.method == "dspark"
    assert _classes(config) == OURS


def test_flags_instead_of_json(pair: Any) -> None:
    """Catches a start through `--spec-method` and `--spec-model` that the plugin does not see."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(pair.target),
        spec_method="dspark",
        spec_model=str(pair.drafter),
        spec_tokens=5,
        **DEFAULTS,
    )
    config = args.create_engine_config()
    assert _classes(config) == OURS
    assert config.speculative_config.num_speculative_tokens == 5
