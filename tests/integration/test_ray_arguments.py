"""From a config file and `serve run` arguments to Ray's description of the engines; no cluster."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve.llm", reason="Ray Serve is an extra: vllm-dspark[ray]")

from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration import ray_serving
from vllm_dspark.integration.carrier import CarriedOptions, MetricsPlace
from vllm_dspark.integration.ray_serving import (
    RayArguments,
    adopt_metrics,
    app,
    llm_config,
    write_target,
)

NODE = "192.0.2.7"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(
        "model: org/target\nmax-num-seqs: 4\nspeculative-config:\n  method: dspark\n"
        "  model: org/drafter\n  num_speculative_tokens: 7\n  dspark:\n    request_floor: 2\n"
    )
    return path


def test_engine_settings_reach_ray(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file read in another way than `serve --config`, and a lost "dspark" object."""
    monkeypatch.setenv("VLLM_DSPARK_CACHE_DIR", "/somewhere")
    made = llm_config(RayArguments(config=config_file, replicas=3, kind="cpu"))
    assert made.model_loading_config.model_id == "org/target"
    assert made.engine_kwargs["max_num_seqs"] == 4
    assert made.engine_kwargs["speculative_config"]["dspark"] == {"request_floor": 2}
    assert made.deployment_config["num_replicas"] == 3
    assert made.accelerator_config.kind == "cpu"
    assert made.runtime_env["env_vars"]["VLLM_DSPARK_CACHE_DIR"] == "/somewhere"


def test_model_name(config_file: Path) -> None:
    """The argument, then the file's served name, then the model's."""
    named = llm_config(RayArguments(config=config_file, name="chat"))
    assert named.model_loading_config.model_id == "chat"
    config_file.write_text("model: org/target\nserved-model-name: [alpha, beta]\n")
    served = llm_config(RayArguments(config=config_file))
    assert served.model_loading_config.model_id == "alpha"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "config"),
        ({"config": "x.yaml", "replica": "2"}, "replica"),
        ({"config": "x.yaml", "replicas": "0"}, "replicas"),
        ({"config": "x.yaml", "kind": "tpu"}, "kind"),
        ({"config": "no-such-file.yaml"}, "no-such-file.yaml"),
    ],
)
def test_wrong_arguments(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(DSparkConfigError, match=message):
        app(arguments)


def carrying(place: MetricsPlace | None) -> Any:
    carried = CarriedOptions(DSparkConfig(), place)
    return SimpleNamespace(additional_config={"dspark": carried})


def test_metrics_are_read_by_the_process_that_runs_the_engine(tmp_path: Path) -> None:
    """Catches what Ray does on GPUs: the config is built in a task whose process then ends, and
    with it the reader of the folder named in the config.
    """
    config = carrying(MetricsPlace(tmp_path / "of-another-process"))
    adopt_metrics(config)
    folder = config.additional_config["dspark"].metrics_place.folder
    assert folder != tmp_path / "of-another-process"
    assert f"-{os.getpid()}-" in folder.name
    off = carrying(None)
    adopt_metrics(off)
    assert off.additional_config["dspark"].metrics_place is None  # "metrics": false stays
    adopt_metrics(SimpleNamespace(additional_config={}))  # no plugin in this engine


def test_targets_of_dead_replicas_are_cleared(tmp_path: Path) -> None:
    """Catches Prometheus scraping ports of the dead, and files of other machines removed."""
    ours = write_target(tmp_path, f"{NODE}:9001", NODE, "alive")
    (target,) = json.loads(ours.read_text())
    assert target["targets"] == [f"{NODE}:9001"]
    assert target["labels"]["replica"] == "alive"
    for name, node in (("dead", NODE), ("elsewhere", "192.0.2.8")):
        labels = {"replica": name, "__dspark_node__": node, "__dspark_pid__": str(2**30)}
        text = json.dumps([{"targets": ["x"], "labels": labels}])
        (tmp_path / f"dspark-{name}.json").write_text(text)
    (tmp_path / "dspark-broken.json").write_text("{")
    write_target(tmp_path, f"{NODE}:9002", NODE, "new")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "dspark-alive.json",
        "dspark-new.json",
        "dspark-elsewhere.json",
        "dspark-broken.json",
    }


def test_the_engine_class_is_made_once() -> None:
    """Catches a new class per call, which Ray would see as another one."""

    class Base:
        pass

    assert ray_serving._engine_class(Base) is ray_serving._engine_class(Base)
