"""Records and files: identity, round trips, refusals, atomic writes."""

import dataclasses
import json
import os
import threading

import numpy as np
import pytest
from pydantic import ValidationError

from tests.artifacts.records import (
    K,
    admission_record,
    calibration_record,
    cost_record,
    fingerprint,
)
from tests.planning.builders import grid
from vllm_dspark.artifacts.fingerprint import MODEL_FIELDS, Fingerprint, hash_config
from vllm_dspark.artifacts.schema import (
    CostTableRecord,
    PositionRecord,
)
from vllm_dspark.artifacts.store import (
    ArtifactStore,
    read_admission,
    read_calibration,
    read_cost_table,
    write_atomic,
    write_record,
)
from vllm_dspark.errors import ArtifactError, CalibrationError, CostTableError
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.quality import PositionQuality


class TestNarrowDraftPasses:
    """Cost tables may know draft passes of fewer than K columns."""

    def test_round_trip(self, tmp_path):
        narrow = {n: grid((1, 32), (1.0 + n, 5.0 + n)) for n in (1, 3)}
        table = dataclasses.replace(cost_record().to_table(), narrow=narrow)
        path = tmp_path / "table.json"
        write_record(path, CostTableRecord.from_table(table, fingerprint()))
        found = read_cost_table(path).to_table()
        assert sorted(found.narrow) == [1, 3]
        assert found.narrow[3].sizes == (1, 32)
        assert found.narrow[3].median_ms.tolist() == [[4.0, 8.0]]

    def test_tables_of_earlier_versions_have_none(self):
        old = cost_record().model_dump(mode="json")
        del old["narrow_draft"]
        assert CostTableRecord.model_validate(old).to_table().narrow == {}

    def test_illegal_ones_are_refused(self):
        table = cost_record().to_table()
        for columns, cells in ((0, (1.0, 2.0)), (2, (1.0, -2.0))):
            broken = dataclasses.replace(table, narrow={columns: grid((1, 32), cells)})
            with pytest.raises(CostTableError, match=f"draft of {columns} columns"):
                broken.validate()


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
