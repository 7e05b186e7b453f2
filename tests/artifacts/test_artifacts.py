"""Records, files, and the decision taken from them before the engine is built."""

import json
import os
import threading

import numpy as np
import pytest
from pydantic import ValidationError

from tests.planning.builders import grid, table_from
from vllm_dspark.artifacts.fingerprint import MODEL_FIELDS, Fingerprint, hash_config
from vllm_dspark.artifacts.freshness import planner_options, resolve
from vllm_dspark.artifacts.schema import (
    AdmissionRecord,
    CalibrationRecord,
    CostTableRecord,
    PositionRecord,
    now,
)
from vllm_dspark.artifacts.store import (
    ArtifactStore,
    read_admission,
    read_calibration,
    read_cost_table,
    write_atomic,
    write_record,
)
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import ArtifactError, CalibrationError, CostTableError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.quality import PositionQuality

K = 7


def fingerprint(**changes):
    values = {
        "device": "NVIDIA H200",
        "device_count": 1,
        "driver": "580.1",
        "cuda": "13.0",
        "triton": "3.9.0",
        "torch": "2.13.0",
        "vllm": "0.32.0",
        "plugin": "0.1.0",
        "model_hash": "m",
        "drafter_hash": "d",
        "quantization": "",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "tensor_parallel": 1,
        "data_parallel": 1,
        "pipeline_parallel": 1,
        "attention_backend": "FLASH_ATTN",
        "num_speculative_tokens": K,
        "ladder": (1, 2, 4, 8, 16),
    }
    return Fingerprint(**(values | changes))


def cost_record(**changes):
    table = table_from(lambda tokens: 5.0 + 0.02 * tokens, (1, 8, 64, 512), K, allocation=0.05)
    return CostTableRecord.from_table(table, fingerprint(**changes))


def calibration_record(width=K, **changes):
    calibration = Calibration((1.5,) * width, (2.0,) * width)
    return CalibrationRecord.from_calibration(calibration, fingerprint(**changes))


def admission_record(scope="decode", low=0.03, **changes):
    return AdmissionRecord(
        created=now(),
        fingerprint=fingerprint(**changes),
        scope=scope,
        workload="sharegpt, 64 clients",
        num_runs=5,
        baseline_tokens_per_s=1000.0,
        scheduled_tokens_per_s=1080.0,
        gain_low=low,
    )


class TestFingerprint:
    def test_every_field_counts(self):
        base = fingerprint()
        for name in Fingerprint.model_fields:
            value = getattr(base, name)
            more = {str: "x", int: 1, tuple: (32,)}[type(value)]
            other = value + more
            changed = fingerprint(**{name: other})
            assert changed.digest() != base.digest(), name
            (line,) = base.differences(changed)
            assert line.startswith(f"{name}: recorded {value!r}")

    def test_calibrations_survive_a_driver_update(self):
        base, updated = fingerprint(), fingerprint(driver="590", device="NVIDIA B200")
        assert base.digest(MODEL_FIELDS) == updated.digest(MODEL_FIELDS)
        assert base.differences(updated, MODEL_FIELDS) == []

    def test_unknown_and_empty_fields_are_refused(self):
        with pytest.raises(ValidationError):
            fingerprint(color="blue")
        with pytest.raises(ValidationError):
            fingerprint(torch="")

    def test_hash_ignores_key_order(self):
        assert hash_config({"a": 1, "b": [2]}) == hash_config({"b": [2], "a": 1})
        assert hash_config({"a": 1}) != hash_config({"a": 2})


class TestRoundTrip:
    def test_cost_table(self, tmp_path):
        record = cost_record()
        write_record(tmp_path / "t.json", record)
        again = read_cost_table(tmp_path / "t.json")
        assert again == record
        one, two = record.to_table(), again.to_table()
        key = (StepMode.FULL, StepShape.RAGGED)
        np.testing.assert_array_equal(one.grids[key].median_ms, two.grids[key].median_ms)
        assert two.allocation_ms == 0.05

    def test_calibration(self, tmp_path):
        raw = PositionQuality(1, 90, 0.8, 0.1, 0.2, 0.16, 0.7)
        fitted = PositionQuality(1, 90, 0.8, 0.02, 0.15, 0.16, 0.71)
        quality = PositionRecord.of(raw, fitted)
        assert (quality.ece_before, quality.ece_after, quality.auc) == (0.1, 0.02, 0.71)
        record = calibration_record().model_copy(update={"greedy_quality": (quality,)})
        write_record(tmp_path / "c.json", record)
        assert read_calibration(tmp_path / "c.json", K) == record
        assert record.to_calibration().sampled == (2.0,) * K

    def test_admission(self, tmp_path):
        write_record(tmp_path / "a.json", admission_record())
        assert read_admission(tmp_path / "a.json").positive

    @pytest.mark.parametrize("low", [0.0, -0.01, 0.2])
    def test_doubtful_or_contradictory_gains_are_not_positive(self, low):
        assert not admission_record(low=low).positive


class TestRefusedFiles:
    def write(self, tmp_path, **changes):
        obj = json.loads(cost_record().model_dump_json())
        obj.update(changes)
        path = tmp_path / "t.json"
        path.write_text(json.dumps(obj))
        return path

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "calibration"}, "holds kind 'calibration', wanted 'cost_table'"),
            ({"version": 2}, "version 2; this release reads version 1"),
            ({"extra": 1}, "extra"),
            ({"grids": []}, "grids"),
            ({"allocation_ms": "much"}, "allocation_ms"),
        ],
    )
    def test_message_names_file_and_fault(self, tmp_path, changes, message):
        path = self.write(tmp_path, **changes)
        with pytest.raises(ArtifactError) as caught:
            read_cost_table(path)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)

    def test_illegal_tables_are_refused_on_reading(self, tmp_path):
        key = (StepMode.EAGER, StepShape.RAGGED)
        flat = CostTable({key: grid((1, 2), (1.0, 1.0))}, grid((1,), (1.0,)))
        path = tmp_path / "flat.json"
        write_record(path, CostTableRecord.from_table(flat, fingerprint()))
        with pytest.raises(CostTableError, match="flat"):
            read_cost_table(path)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00"])
    def test_not_a_json_object(self, tmp_path, text):
        path = tmp_path / "t.json"
        path.write_text(text)
        with pytest.raises(ArtifactError, match=r"not (JSON|a JSON object)"):
            read_cost_table(path)

    def test_missing_file_and_folder(self, tmp_path):
        with pytest.raises(ArtifactError, match="No such file"):
            read_cost_table(tmp_path / "none.json")
        with pytest.raises(ArtifactError, match="cannot read"):
            read_cost_table(tmp_path)


class TestForeignCalibration:
    def read(self, tmp_path, obj, width=3):
        path = tmp_path / "sts.json"
        path.write_text(json.dumps(obj))
        return read_calibration(path, width)

    @pytest.mark.parametrize("key", ["temperatures", "sts_temperatures"])
    def test_both_spellings(self, tmp_path, key):
        obj = {key: [1.1, 1.2, 2], "dataset": "mt-bench", "num_samples": 900, "ece_before": 0.1}
        record = self.read(tmp_path, obj)
        assert record.greedy == record.sampled == (1.1, 1.2, 2.0)
        assert (record.dataset, record.num_samples, record.fingerprint) == ("mt-bench", 900, None)

    @pytest.mark.parametrize(
        ("obj", "message"),
        [
            ({"temperatures": [1.0, 1.0]}, "calibrates 2 draft positions"),
            ({"temperatures": [1.0, 1.0, float("nan")]}, "nan"),
            ({"temperatures": [1.0, 1.0, float("inf")]}, "inf"),
            ({"temperatures": [1.0, 1.0, 0.0]}, "position 3"),
            ({"temperatures": [1.0, 1.0, "1"]}, "no number"),
            ({"temperatures": [1.0, 1.0, True]}, "no number"),
            ({"temperatures": 1.0}, "no list of numbers"),
            ({"temperatures": []}, "no list of numbers"),
            ({"temperatures": [1.0] * 3, "sts_temperatures": [2.0] * 3}, "disagree"),
        ],
    )
    def test_refusals(self, tmp_path, obj, message):
        with pytest.raises(CalibrationError, match=message):
            self.read(tmp_path, obj)

    def test_neither_ours_nor_theirs(self, tmp_path):
        with pytest.raises(ArtifactError, match="wanted 'calibration'"):
            self.read(tmp_path, {"temps": [1.0] * 3})


class TestStore:
    def test_second_start_finds_what_the_first_one_saved(self, tmp_path):
        store = ArtifactStore(tmp_path / "new" / "folder")
        assert store.load_cost_table(fingerprint()) is None
        store.save(cost_record())
        store.save(calibration_record())
        assert store.load_cost_table(fingerprint()) == cost_record().model_copy(
            update={"created": store.load_cost_table(fingerprint()).created}
        )
        assert store.load_cost_table(fingerprint(driver="590")) is None
        assert store.load_calibration(fingerprint(driver="590")) is not None
        assert store.load_calibration(fingerprint(dtype="float16")) is None

    def test_a_file_under_the_wrong_name_is_not_used(self, tmp_path):
        store = ArtifactStore(tmp_path)
        store.save(cost_record(driver="old"))
        os.rename(
            store.cost_table_path(fingerprint(driver="old")), store.cost_table_path(fingerprint())
        )
        assert store.load_cost_table(fingerprint()) is None

    def test_readers_never_see_half_a_file(self, tmp_path):
        path, texts = tmp_path / "x.json", ["a" * 200_000, "b" * 200_000]
        write_atomic(path, texts[0])
        stop, seen = threading.Event(), set()

        def read():
            while not stop.is_set():
                seen.add(path.read_text())

        reader = threading.Thread(target=read)
        reader.start()
        for i in range(40):
            write_atomic(path, texts[i % 2])
        stop.set()
        reader.join()
        assert seen <= set(texts)
        assert os.listdir(tmp_path) == ["x.json"]

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "x.json"
        write_atomic(path, "old")

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_atomic(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["x.json"]


class TestResolve:
    @pytest.fixture
    def store(self, tmp_path):
        return ArtifactStore(tmp_path / "cache")

    def decide(self, store, options=None, **live):
        config = DSparkConfig.from_mapping(options or {}, live.get("num_speculative_tokens", K))
        return resolve(config, fingerprint(**live), store)

    @pytest.mark.parametrize(
        ("options", "live", "reason"),
        [
            ({"enabled": False}, {}, "disabled"),
            ({"scheduling": False}, {}, "'scheduling': false"),
            ({}, {"num_speculative_tokens": 1}, "nothing to trim"),
            ({}, {"data_parallel": 2}, "data_parallel_size = 2"),
        ],
    )
    def test_off(self, store, options, live, reason):
        found = self.decide(store, options, **live)
        assert not found.scheduling
        assert reason in found.off_reason

    def test_first_start_measures_second_start_reuses(self, store):
        first = self.decide(store)
        assert first.scheduling
        assert first.needs_profile
        assert first.calibration == Calibration.identity(K)
        store.save(cost_record())
        store.save(calibration_record())
        second = self.decide(store)
        assert not second.needs_profile
        assert second.cost_table.allocation_ms == 0.05
        assert second.calibration.greedy == (1.5,) * K
        assert second.notes == ()
        assert self.decide(store, driver="590").needs_profile

    def test_damaged_cache_is_measured_anew_and_noted(self, store):
        store.save(cost_record())
        store.cost_table_path(fingerprint()).write_text("{")
        found = self.decide(store)
        assert found.needs_profile
        assert "cached cost table ignored" in found.notes[0]

    def test_named_table_of_another_machine_is_used_with_a_note(self, store, tmp_path):
        path = tmp_path / "t.json"
        write_record(path, cost_record(device="NVIDIA H100"))
        found = self.decide(store, {"cost_table": str(path)})
        assert found.cost_table is not None
        assert "recorded 'NVIDIA H100', now 'NVIDIA H200'" in found.notes[0]

    def test_named_table_for_another_width_is_not(self, store, tmp_path):
        path = tmp_path / "t.json"
        write_record(path, cost_record(num_speculative_tokens=5))
        assert "measured for 5 drafts" in self.decide(store, {"cost_table": str(path)}).off_reason

    def test_named_table_that_is_illegal_switches_off(self, store, tmp_path):
        path = tmp_path / "t.json"
        path.write_text("{}")
        assert "wanted 'cost_table'" in self.decide(store, {"cost_table": str(path)}).off_reason

    def test_named_calibration_that_is_illegal_raises(self, store, tmp_path):
        path = tmp_path / "c.json"
        path.write_text('{"temperatures": [1, 2]}')
        with pytest.raises(CalibrationError, match="num_speculative_tokens is 7"):
            self.decide(store, {"calibration": str(path)})

    def strict(self, store, tmp_path, **records):
        """Freshness demanded, with these files named."""
        options = {"validate_confidence_artifact_freshness": True}
        for name, record in records.items():
            path = tmp_path / f"{name}.json"
            write_record(path, record)
            options[name] = str(path)
        return self.decide(store, options)

    def test_freshness_satisfied(self, store, tmp_path):
        store.save(cost_record())
        found = self.strict(
            store, tmp_path, admission_evidence=admission_record(), calibration=calibration_record()
        )
        assert found.scheduling
        assert found.cost_table is not None

    @pytest.mark.parametrize(
        ("records", "reason"),
        [
            ({}, "no admission evidence is named"),
            ({"admission_evidence": admission_record(low=-0.01)}, "gain is not positive"),
            ({"admission_evidence": admission_record(driver="1")}, "driver: recorded '1'"),
            ({"admission_evidence": admission_record(scope="mixed")}, "about mixed steps"),
            ({"admission_evidence": calibration_record()}, "wanted 'admission'"),
            ({"cost_table": cost_record(triton="1")}, "triton: recorded '1'"),
            ({"calibration": calibration_record(dtype="fp8")}, "dtype: recorded 'fp8'"),
            ({"calibration": calibration_record(width=3)}, "calibrates 3 draft positions"),
        ],
    )
    def test_freshness_violated(self, store, tmp_path, records, reason):
        store.save(cost_record())
        found = self.strict(store, tmp_path, **records)
        assert not found.scheduling
        assert reason in found.off_reason

    def test_freshness_without_a_table(self, store, tmp_path):
        found = self.strict(store, tmp_path, admission_evidence=admission_record())
        assert "vllm-dspark profile" in found.off_reason

    def test_foreign_calibrations_are_never_fresh(self, store, tmp_path):
        path = tmp_path / "sts.json"
        path.write_text(json.dumps({"temperatures": [1.0] * K}))
        options = {"calibration": str(path)}
        assert "no fingerprint" in self.decide(store, options).notes[0]
        options["validate_confidence_artifact_freshness"] = True
        assert "no fingerprint" in self.decide(store, options).off_reason

    @pytest.mark.parametrize(
        ("record", "mixed"),
        [
            (admission_record("mixed"), True),
            (admission_record("mixed", low=-0.1), False),
            (admission_record("mixed", driver="1"), False),
            (admission_record("decode"), False),
            (calibration_record(), False),
        ],
    )
    def test_mixed_evidence_is_always_checked_in_full(self, store, tmp_path, record, mixed):
        path = tmp_path / "m.json"
        write_record(path, record)
        found = self.decide(store, {"confidence_mixed_evidence": str(path)})
        assert found.scheduling  # decode-only steps are scheduled all the same
        assert found.mixed is mixed
        assert len(found.notes) == int(not mixed)

    def test_options_reach_the_planner(self, store):
        given = {
            "confidence_min_predicted_gain": 0.1,
            "hysteresis_steps": 2,
            "drain_guard": False,
            "skip_draft": False,
            "probe_interval": 9,
            "request_floor": 1,
            "test_windows": [1, 2],
            "test_windows_seed": 3,
        }
        config = DSparkConfig.from_mapping(given, K)
        options = planner_options(config, self.decide(store), device_windows=True)
        assert options.device_windows
        assert options.test_windows == (1, 2)
        for name, value in given.items():
            short = name.removeprefix("confidence_").replace("min_predicted_gain", "min_gain")
            expected = tuple(value) if isinstance(value, list) else value
            assert getattr(options, short) == expected
