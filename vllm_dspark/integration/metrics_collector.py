"""Front end: the place where engines leave their records, and the collector that reads them.

One collector per process, on prometheus_client's default registry, which vLLM's /metrics and
`LLM.get_metrics()` read. It holds no values of its own, so engines may come and go.
"""

import atexit
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from vllm_dspark.config import prometheus_multiproc_folder
from vllm_dspark.integration.carrier import MetricsPlace
from vllm_dspark.integration.metrics_catalog import ENGINE_LABELS, FALLBACKS, Family, catalog
from vllm_dspark.integration.metrics_files import (
    PrometheusFiles,
    Record,
    RecordFile,
    RecordHeader,
    Sink,
    Values,
    read_records,
    sweep,
)

logger = logging.getLogger("vllm.vllm_dspark")

_FOLDER_PREFIX = "vllm-dspark-metrics-"


class DSparkCollector:
    """Reads all records of a folder at each scrape."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def describe(self) -> list[Metric]:
        """Nothing: names become known with the first engine, and no other collector has them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of all living engines, one family each."""
        merged: dict[tuple[str, str], list[Record]] = {}
        for record in read_records(self.folder):
            merged.setdefault(record.header.labels, []).append(record)
        families: dict[str, Metric] = {}
        for labels, records in merged.items():
            newest = records[-1].header
            own = catalog(newest.width, newest.off_reason)
            values = _merge(own, records)
            start = 0
            for family in own:
                metric = families.get(family.name)
                if metric is None:
                    metric = families[family.name] = _new_metric(family)
                _add(metric, family, labels, values[start : start + family.size])
                start += family.size
        yield from families.values()


def _merge(families: Sequence[Family], records: Sequence[Record]) -> Values:
    """Values of engines with the same labels: counts add up, gauges are the newest engine's.

    Engines of another width cannot be added; the newest one stands alone then.
    """
    newest = records[-1]
    total = newest.values.copy()
    for record in records[:-1]:
        if record.values.size == total.size:
            total += record.values
    start = 0
    for family in families:
        if family.kind == "gauge":
            part = slice(start, start + family.size)
            total[part] = newest.values[part]
        start += family.size
    return total


def _new_metric(family: Family) -> Metric:
    names = [*ENGINE_LABELS, *family.labels]
    if family.kind == "counter":
        return CounterMetricFamily(family.full_name, family.help, labels=names)
    if family.kind == "gauge":
        return GaugeMetricFamily(family.full_name, family.help, labels=names)
    return HistogramMetricFamily(family.full_name, family.help, labels=names)


def _add(metric: Metric, family: Family, labels: Sequence[str], values: Values) -> None:
    """Append one engine's samples to a family."""
    if isinstance(metric, HistogramMetricFamily):
        counts = np.cumsum(values[:-1]).tolist()
        bounds = [floatToGoString(bound) for bound in family.bounds]
        buckets = list(zip(bounds, counts, strict=True))
        metric.add_metric(list(labels), buckets, float(values[-1]))
        return
    for cell, value in zip(family.cells, values.tolist(), strict=True):
        if math.isnan(value) or (family.sparse and value == 0.0):
            continue
        metric.add_metric([*labels, *cell], value)  # type: ignore[attr-defined]


class _FrontEnd:
    """This process's folder and collector, made at the first engine."""

    def __init__(self) -> None:
        self._pid = 0
        self._collector: DSparkCollector | None = None
        self._declined: dict[tuple[str, str], list[Sink]] = {}

    def folder(self) -> Path:
        """The folder that engines of this process write to; registers the collector once."""
        if self._collector is None or self._pid != os.getpid():  # first engine, or a fork
            base = Path(tempfile.gettempdir())
            sweep(base, f"{_FOLDER_PREFIX}*")
            self._pid = os.getpid()
            # Only the name: the first engine makes the folder. Random, so nobody waits there.
            folder = base / f"{_FOLDER_PREFIX}{self._pid}-{secrets.token_hex(8)}"
            atexit.register(_forget, folder, self._pid)
            if self._collector is None:
                self._collector = DSparkCollector(folder)
                REGISTRY.register(self._collector)
            self._collector.folder = folder
        return self._collector.folder

    def publish_declined(
        self, place: MetricsPlace, labels: tuple[str, str], width: int, declined: Sequence[str]
    ) -> None:
        """Say in the engine core's place what was given up; the newest engine's word counts."""
        for sink in self._declined.pop(labels, ()):
            sink.close()
        sinks = open_sinks(place, labels, width, "")
        start = -len(FALLBACKS)  # the last family
        for sink in sinks:
            values = np.zeros(sum(family.size for family in catalog(width)))
            for reason in declined:
                values[start + list(FALLBACKS).index(reason)] = 1.0
            sink.publish(values)
        self._declined[labels] = sinks


def _forget(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


_FRONT_END = _FrontEnd()


def provide_place() -> MetricsPlace:
    """The place for engines started by this process, with the collector reading it."""
    return MetricsPlace(_FRONT_END.folder(), prometheus_multiproc_folder())


def publish_declined(
    place: MetricsPlace, model_name: str, engine: str, width: int, declined: Sequence[str]
) -> None:
    """Publish, from the front end, what an engine without our scheduler gave up."""
    _FRONT_END.publish_declined(place, (model_name, engine), width, declined)


def open_sinks(
    place: MetricsPlace, labels: tuple[str, str], width: int, off_reason: str
) -> list[Sink]:
    """Files of a place for one engine; a folder that cannot be written costs metrics only."""
    families = catalog(width, off_reason)
    header = RecordHeader(*labels, width, off_reason, os.getpid(), time.time())
    sinks: list[Sink] = []
    try:
        sinks.append(RecordFile(place.folder, header, sum(family.size for family in families)))
        if place.multiprocess_folder is not None:
            sinks.append(PrometheusFiles(place.multiprocess_folder, families, labels))
    except OSError as error:
        logger.warning("vllm-dspark: metrics are off, their file cannot be made: %s", error)
    return sinks
