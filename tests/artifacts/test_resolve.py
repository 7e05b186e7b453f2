"""The decision taken from options and files before the engine is built."""

import json

import pytest

from tests.artifacts.records import (
    K,
    admission_record,
    calibration_record,
    cost_record,
    fingerprint,
)
from vllm_dspark.artifacts.freshness import planner_options, resolve
from vllm_dspark.artifacts.store import (
    ArtifactStore,
    write_record,
)
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import CalibrationError
from vllm_dspark.planning.calibration import Calibration


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
        assert first.used == ()
        table, calibration = store.save(cost_record()), store.save(calibration_record())
        second = self.decide(store)
        assert not second.needs_profile
        assert second.cost_table.allocation_ms == 0.05
        assert second.calibration.greedy == (1.5,) * K
        assert second.notes == ()
        assert second.used == (f"calibration {calibration}", f"cost table {table}")
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
        assert found.used == (f"cost table {path}",)

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

    @pytest.mark.parametrize("online", [True, False])
    def test_auto_evidence_needs_times_of_served_steps(self, store, online):
        """Catches "auto" taken for a file, and trimming that waits for prices that never come."""
        found = self.decide(store, {"confidence_mixed_evidence": "auto", "online_cost": online})
        assert found.scheduling and found.mixed is online
        assert len(found.notes) == int(not online)
        assert all("online_cost" in note for note in found.notes)

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
