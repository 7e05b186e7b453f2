"""The calibration that is packaged beside the demo drafter."""

import json
import shutil
from pathlib import Path

from vllm_dspark.artifacts.store import read_calibration
from vllm_dspark.demo.server import ServeSettings, dspark, serve_command
from vllm_dspark.demo.target import calibration_path, drafter_path

K = 7


def options(drafter: Path, width: int = K) -> dict[str, str]:
    settings = ServeSettings(Path("target"), num_speculative_tokens=width)
    command = serve_command(dspark(drafter), settings, Path("folder/x.sock"))
    found: dict[str, str] = json.loads(command[-1])["dspark"]
    return found


def test_the_demo_serves_with_it() -> None:
    """Catches a packaged file that nothing uses, or that an engine refuses."""
    path = Path(options(drafter_path())["calibration"])
    record = read_calibration(path, K)
    assert record.fingerprint is not None
    assert record.fingerprint.acceptance_rule == "standard/greedy"
    assert record.fingerprint.num_speculative_tokens == K
    assert record.dataset.endswith("not trained on")


def test_it_is_about_that_drafter_and_width_only(tmp_path: Path) -> None:
    """Catches confidences of another drafter bent by this one's calibration."""
    assert "calibration" not in options(drafter_path(), 5)
    other = tmp_path / "drafter"
    shutil.copytree(drafter_path(), other)
    assert "calibration" not in options(other)
    assert calibration_path(other, K) is None


def test_its_figures_are_what_the_page_says() -> None:
    """Catches a calibration that was replaced without measuring it: goals of every position."""
    path = calibration_path(drafter_path(), K)
    assert path is not None
    record = read_calibration(path, K)
    for quality in (record.greedy_quality, record.sampled_quality):
        assert len(quality) == K
        for row in quality:
            assert row.count > 2000
            assert row.brier_after < row.brier_of_base_rate
            assert row.ece_after < row.ece_before + 0.005
