"""Records that artifact tests start from."""

from tests.planning.builders import table_from
from vllm_dspark.artifacts.fingerprint import Fingerprint
from vllm_dspark.artifacts.schema import AdmissionRecord, CalibrationRecord, CostTableRecord, now
from vllm_dspark.planning.calibration import Calibration

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
