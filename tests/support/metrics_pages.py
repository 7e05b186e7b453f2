"""Reading the /metrics page of a real server."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import PATIENCE_S
from vllm_dspark.integration.metrics_catalog import catalog

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(base: str) -> Samples:
    """{sample name: {labels: value}} of vLLM's metrics; fails on duplicates."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                series = found.setdefault(sample.name, {})
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in series, f"duplicate {sample.name} {labels}"
                series[labels] = sample.value
    return found


def total(samples: Samples, name: str) -> float:
    """Sum over labels."""
    return sum(samples.get(name, {}).values())


def check_catalog(samples: Samples, width: int) -> None:
    """Every metric of the catalog is there, with the labels that vLLM gives its own."""
    for family in catalog(width):
        if family.sparse or family.name in ("ece", "cost_ratio"):
            continue  # may be empty
        for name in family.sample_names:
            assert name in samples, name
            for labels in samples[name]:
                own = dict(labels)
                assert own.pop("model_name") == "tiny"
                assert own.pop("engine") == "0"
                assert "pid" not in own
