"""The carrier: record files, prometheus_client's files, and the collector over them."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import PATIENCE_S
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.carrier import CarriedOptions, MetricsPlace
from vllm_dspark.integration.metrics_catalog import FALLBACKS, catalog
from vllm_dspark.integration.metrics_collector import DSparkCollector, _FrontEnd, open_sinks
from vllm_dspark.integration.metrics_files import (
    PrometheusFiles,
    RecordFile,
    RecordHeader,
    read_records,
    sweep,
)
from vllm_dspark.integration.settle import _metrics_place

K = 3
FAMILIES = catalog(K)
SIZE = sum(family.size for family in FAMILIES)


def header(engine="0", model="m", width=K, started=1.0):
    return RecordHeader(model, engine, width, "", os.getpid(), started)


def scrape(folder):
    registry = CollectorRegistry()
    registry.register(DSparkCollector(folder))
    return parse(generate_latest(registry).decode())


def parse(text):
    """{(sample name, labels): value}; fails on duplicates, as Prometheus does."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"duplicate {key}"
            samples[key] = sample.value
    return samples


def key(name, **labels):
    return (
        f"vllm:dspark_{name}",
        tuple(sorted({"model_name": "m", "engine": "0", **labels}.items())),
    )


class TestRecordFile:
    def test_values_arrive_and_the_file_goes(self, tmp_path):
        file = RecordFile(tmp_path / "f", header(), 5)
        file.publish(np.arange(5.0))
        (record,) = read_records(tmp_path / "f")
        assert record.header == header()
        assert record.values.tolist() == [0, 1, 2, 3, 4]
        file.close()
        file.close()
        assert not (tmp_path / "f").exists()
        assert read_records(tmp_path / "f") == []

    def test_a_forgotten_file_goes_with_its_owner(self, tmp_path):
        file = RecordFile(tmp_path / "f", header(), 5)
        del file
        assert not (tmp_path / "f").exists()

    def test_no_torn_reads(self, tmp_path):
        """Catches a reader that sees half of one publication and half of the next."""
        size = 1 << 17  # a megabyte, so that reads and publications overlap
        file = RecordFile(tmp_path / "f", header(), size)
        stop = threading.Event()

        def write():
            value = 0.0
            while not stop.is_set():
                value += 1.0
                file.publish(np.full(size, value))
                time.sleep(2e-4)

        writer = threading.Thread(target=write)
        writer.start()
        found = []
        try:
            while len(found) < 300:  # (a reader may give up now and then)
                found += [(r.values.min(), r.values.max()) for r in read_records(tmp_path / "f")]
        finally:
            stop.set()
            writer.join()
        assert all(low == high for low, high in found)

    def test_an_unfinished_publication_is_not_read(self, tmp_path):
        file = RecordFile(tmp_path / "f", header(), 2)
        file._sequence += 1
        assert read_records(tmp_path / "f") == []
        file._sequence += 1
        assert len(read_records(tmp_path / "f")) == 1

    def test_the_file_of_a_killed_process_is_ignored_and_removed(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        child = context.Process(target=publish_and_wait, args=(tmp_path / "f", ready))
        child.start()
        try:
            assert ready.wait(PATIENCE_S)
            assert len(read_records(tmp_path / "f")) == 1
            os.kill(child.pid, signal.SIGKILL)
        finally:
            child.join()
        assert read_records(tmp_path / "f") == []
        assert list((tmp_path / "f").iterdir()) == []

    def test_sweep_removes_only_what_nobody_holds(self, tmp_path):
        held = RecordFile(tmp_path / "x-held", header(), 2)
        (tmp_path / "x-dead").mkdir()
        (tmp_path / "x-dead" / "old.dspark").write_bytes(b"whatever")
        sweep(tmp_path, "x-*")
        assert [p.name for p in tmp_path.iterdir()] == ["x-held"]
        held.close()

    def test_foreign_and_broken_files_are_no_records(self, tmp_path):
        (tmp_path / "a.dspark").write_bytes(b"")
        (tmp_path / "b.txt").write_bytes(b"keep")
        assert read_records(tmp_path) == []
        assert [p.name for p in tmp_path.iterdir()] == ["b.txt"]


def publish_and_wait(folder, ready):
    file = RecordFile(folder, header(), 3)
    ready.set()
    time.sleep(PATIENCE_S)
    file.close()


class TestCollector:
    def test_no_engine_no_metrics(self, tmp_path):
        assert scrape(tmp_path / "nothing") == {}

    def test_counters_gauges_and_histograms(self, tmp_path):
        values = named(
            accepted_tokens=[5, 3, 1], window=[2, 0, 1, 4, 0, 20], ece=[0.1, np.nan, 0.3]
        )
        file = RecordFile(tmp_path, header(), SIZE)
        file.publish(values)
        samples = scrape(tmp_path)
        assert samples[key("accepted_tokens_total", position="1")] == 3
        assert samples[key("window_bucket", le="3.0")] == 3
        assert samples[key("window_bucket", le="+Inf")] == samples[key("window_count")] == 7
        assert samples[key("window_sum")] == 20
        assert samples[key("ece", position="2")] == 0.3
        assert key("ece", position="1") not in samples
        assert not any("steps_total" in name and "kind" in str(labels) for name, labels in samples)

    def test_engines_side_by_side(self, tmp_path):
        files = [RecordFile(tmp_path, header(e, m), SIZE) for e in "01" for m in ("m", "n")]
        for value, file in enumerate(files):
            file.publish(named(emitted_tokens=[value]))
        samples = scrape(tmp_path)
        found = {labels: v for (name, labels), v in samples.items() if "emitted" in name}
        assert sorted(found.values()) == [0, 1, 2, 3]

    def test_twins_add_up_and_the_newest_speaks_for_gauges(self, tmp_path):
        """Catches duplicate series from two engines of one name, which fail the whole scrape."""
        old = RecordFile(tmp_path, header(started=1.0), SIZE)
        new = RecordFile(tmp_path, header(started=2.0), SIZE)
        old.publish(named(emitted_tokens=[10], draft_width=[9]))
        new.publish(named(emitted_tokens=[1], draft_width=[3]))
        samples = scrape(tmp_path)
        assert samples[key("emitted_tokens_total")] == 11
        assert samples[key("draft_width")] == 3
        old.close()
        assert scrape(tmp_path)[key("emitted_tokens_total")] == 1

    def test_twins_of_another_width_do_not_mix(self, tmp_path):
        other = catalog(7)
        wide = RecordFile(tmp_path, header(width=7), sum(f.size for f in other))
        narrow = RecordFile(tmp_path, header(started=2.0), SIZE)
        narrow.publish(named(accepted_tokens=[1, 1, 1]))
        wide.publish(np.full(sum(f.size for f in other), 100.0))
        samples = scrape(tmp_path)
        assert samples[key("accepted_tokens_total", position="0")] == 1
        assert key("accepted_tokens_total", position="5") not in samples


def named(**families):
    values = np.zeros(SIZE)
    start = 0
    for family in FAMILIES:
        if family.name in families:
            values[start : start + family.size] = families[family.name]
        start += family.size
    return values


class TestPrometheusFiles:
    def test_the_same_numbers_as_the_own_collector(self, tmp_path):
        rng = np.random.default_rng(0)
        values = rng.integers(1, 100, size=SIZE).astype(float)
        own, theirs = tmp_path / "own", tmp_path / "theirs"
        theirs.mkdir()
        record = RecordFile(own, header(), SIZE)
        files = PrometheusFiles(theirs, FAMILIES, ("m", "0"))
        for sink in (record, files):
            sink.publish(values * 2)
            sink.publish(values)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(theirs))
        assert parse(generate_latest(registry).decode()) == scrape(own)
        files.close()
        assert list(theirs.iterdir()) == []

    def test_engines_of_several_processes_and_of_one(self, tmp_path):
        twins = [PrometheusFiles(tmp_path, FAMILIES, ("m", e)) for e in ("0", "1", "1")]
        for file in twins:
            file.publish(named(emitted_tokens=[2], draft_width=[3]))
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        samples = parse(generate_latest(registry).decode())
        assert samples[key("emitted_tokens_total")] == 2
        assert samples[key("emitted_tokens_total", engine="1")] == 4


class TestPlace:
    def test_travels_with_the_options(self):
        place = MetricsPlace(Path("/somewhere"), Path("/multi"))
        carried = CarriedOptions(DSparkConfig(), place, ("foreign_worker",))
        again = pickle.loads(pickle.dumps(carried))
        assert (again.metrics_place, again.declined) == (place, ("foreign_worker",))
        assert again == {}  # nothing enters the compile hash

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_cannot_be_written_costs_metrics_only(self, tmp_path, caplog):
        tmp_path.chmod(0o500)
        assert open_sinks(MetricsPlace(tmp_path / "f"), ("m", "0"), K, "") == []

    def test_a_folder_that_is_a_file_costs_metrics_only(self, tmp_path):
        (tmp_path / "f").write_text("")
        assert open_sinks(MetricsPlace(tmp_path / "f"), ("m", "0"), K, "") == []

    def test_both_kinds_of_file(self, tmp_path):
        multi = tmp_path / "multi"
        multi.mkdir()
        sinks = open_sinks(MetricsPlace(tmp_path / "f", multi), ("m", "0"), K, "off")
        assert len(list(multi.glob("*.db"))) == 3
        for sink in sinks:
            sink.close()
        assert list(multi.iterdir()) == []


FRONT_END = """
import os
from prometheus_client import REGISTRY
from vllm_dspark.integration.metrics_collector import DSparkCollector, provide_place

def collectors():
    return [c for c in REGISTRY._collector_to_names if isinstance(c, DSparkCollector)]

place = provide_place()
assert provide_place() == place and not place.folder.exists(), "a place is only a name"
assert [c.folder for c in collectors()] == [place.folder]
place.folder.mkdir()
(place.folder / "x").write_text("")
child = os.fork()
if child == 0:
    other = provide_place()
    assert other.folder != place.folder
    assert [c.folder for c in collectors()] == [other.folder], "one, of the child"
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert place.folder.exists(), "the child must not clean up for its parent"
print(place.folder)
"""


def test_a_front_end_its_fork_and_its_end(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FRONT_END]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


class TestDeclined:
    """What an engine without our scheduler gave up is said by the front end."""

    def test_is_published_and_replaced(self, tmp_path):
        front_end = _FrontEnd()
        place = MetricsPlace(tmp_path / "f")
        for declined in (["stood_aside"], ["foreign_worker", "foreign_scheduler"]):
            front_end.publish_declined(place, ("m", "0"), K, declined)
        samples = scrape(tmp_path / "f")
        found = {dict(labels)["reason"] for name, labels in samples if "fallbacks" in name}
        assert found == {"foreign_worker", "foreign_scheduler"}

    @pytest.mark.parametrize(
        ("count", "rank", "wanted"), [(1, 0, True), (2, -1, True), (2, 0, False), (2, 1, False)]
    )
    def test_one_of_several_api_servers_provides_nothing(self, count, rank, wanted):
        args = SimpleNamespace(_api_process_count=count, _api_process_rank=rank)
        assert (_metrics_place(args, DSparkConfig()) is not None) == wanted
        assert _metrics_place(args, DSparkConfig(metrics=False)) is None


def test_fallbacks_are_the_last_family():
    """`publish_declined` of the front end relies on it."""
    assert FAMILIES[-1].name == "fallbacks"
    assert FAMILIES[-1].size == len(FALLBACKS)
