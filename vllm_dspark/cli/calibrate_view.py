"""What `calibrate` shows: quality per class and position, and the diagrams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_dspark.cli.calibrate import CLASSES, CalibrateReport
from vllm_dspark.cli.figures import calibration_figures
from vllm_dspark.planning.reliability import ClassFit, PositionFit


def show(report: CalibrateReport, console: Console) -> None:
    """Quality per class and position, and where the artifact is."""
    for name, fit in report.fits.items():
        console.print(quality_table(name, fit, report.against.get(name)))
    for note in report.facts["notes"]:
        console.print(note, highlight=False)
    missing = [name for name in CLASSES if name not in report.fits]
    if missing:
        console.print(
            f"{' and '.join(missing)} requests were not measured: their confidences stay as they "
            "are",
            style="yellow",
        )
    for path in report.paths:
        console.print(f"saved {path}", highlight=False, soft_wrap=True)


def quality_table(name: str, fit: ClassFit, against: Sequence[PositionFit] | None) -> Table:
    """Held-out quality of one class, by position of the draft.

    rate: how often drafts up to this one are all accepted; floor: ECE of a perfect forecast; base:
    Brier score of always forecasting the rate.
    """
    view = Table(
        title=f"{name} ({fit.method}): fitted on {fit.num_fit} rows, judged on {fit.num_held_out} "
        "of other prompts",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    for title in ("#", "T", "offset", "rate", "ECE", "(floor)"):
        view.add_column(title, justify="right", no_wrap=True)
    if against is not None:
        view.add_column("the other's", justify="right", no_wrap=True)
    for title in ("Brier", "(base)", "AUC"):
        view.add_column(title, justify="right", no_wrap=True)
    for index, item in enumerate(fit.positions):
        other = [f"{against[index].after.ece:.3f}"] if against is not None else []
        before, after = item.before, item.after
        view.add_row(
            str(after.position),
            f"{fit.temperatures[index]:.2f}",
            f"{fit.offsets[index]:+.2f}",
            f"{after.base_rate:.0%}",
            f"{before.ece:.3f} > {after.ece:.3f}",
            f"({item.ece_floor:.3f})",
            *other,
            f"{before.brier:.3f} > {after.brier:.3f}",
            f"({after.brier_of_base_rate:.3f})",
            f"{after.auc:.3f}",
        )
    return view


def reliability_files(report: CalibrateReport, path: Path) -> None:
    """The diagrams as one image."""
    from vllm_dspark.cli.draw import draw_image

    draw_image(calibration_figures(report.fits), path)
