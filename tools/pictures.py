"""The two pictures of the documentation, as SVG text; the same input gives the same bytes.

The decision picture is drawn from the planning code itself (`planning.allocation.rank`), for an
invented price curve and invented confidences: it explains, it measures nothing.
"""

from dataclasses import dataclass, field
from html import escape

import numpy as np

from vllm_dspark.planning.allocation import rank
from vllm_dspark.planning.survival import survival

INK, GREY, BLUE, ORANGE, GREEN = "#333333", "#999999", "#3f51b5", "#e65100", "#2e7d32"
_FONT = "font-family='sans-serif'"


@dataclass
class Canvas:
    """Collects SVG elements; coordinates in pixels from the top left."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        anchor: str = "start",
        colour: str = INK,
    ) -> None:
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' "
            f"fill='{colour}' {_FONT}>{escape(words)}</text>"
        )

    def path(self, points: list[tuple[float, float]], colour: str, width: float = 2.0) -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f"<polyline points='{where}' fill='none' stroke='{colour}' stroke-width='{width}'/>"
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        self.parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{colour}'/>")

    def box(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = GREY) -> None:
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' "
            f"stroke='{stroke}'/>"
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = INK) -> None:
        self.path(points, colour, 1.5)
        (x0, y0), (x1, y1) = points[-2:]
        step = np.array([x1 - x0, y1 - y0]) / np.hypot(x1 - x0, y1 - y0)
        side = np.array([-step[1], step[0]])
        tip = np.array([x1, y1])
        corners = [tip, tip - 8 * step + 4 * side, tip - 8 * step - 4 * side]
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f"<polygon points='{where}' fill='{colour}'/>")

    def svg(self, title: str) -> str:
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"role='img' aria-label='{escape(title, quote=True)}'>"
        )
        background = f"<rect width='{self.width}' height='{self.height}' fill='white'/>"
        return "\n".join(
            [head, f"<title>{escape(title)}</title>", background, *self.parts, "</svg>\n"]
        )


@dataclass(frozen=True)
class Panel:
    """Maps data to a plotting area."""

    canvas: Canvas
    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return self.left + across * self.width, self.top + (1.0 - up) * self.height

    def frame(self, title: str, y_ticks: list[float]) -> None:
        canvas, bottom = self.canvas, self.top + self.height
        canvas.path(
            [(self.left, self.top), (self.left, bottom), (self.left + self.width, bottom)], INK, 1
        )
        canvas.text(self.left, self.top - 12, title)
        for value in y_ticks:
            x, y = self.at(self.x_range[0], value)
            canvas.path([(x - 4, y), (x, y)], INK, 1)
            canvas.text(x - 7, y + 4, f"{value:g}", 11, "end")

    def x_ticks(self, values: list[float], label: str) -> None:
        for value in values:
            x, y = self.at(value, self.y_range[0])
            self.canvas.path([(x, y), (x, y + 4)], INK, 1)
            self.canvas.text(x, y + 17, f"{value:g}", 11, "middle")
        middle = self.left + self.width / 2
        self.canvas.text(middle, self.top + self.height + 36, label, 12, "middle")


# The example: 32 requests, K = 7, draft confidences from 0.55 to 0.95.
_REQUESTS, _WIDTH = 32, 7
_LADDER = np.array([*range(32, 129, 16), *range(160, 257, 32)])
_DRAFT_MS = 1.0


def _price_ms(tokens: np.ndarray) -> np.ndarray:
    """Invented: bound by memory up to 64 tokens, then by arithmetic; padded to the ladder."""
    padded = _LADDER[np.searchsorted(_LADDER, tokens)]
    return 8.0 + 0.045 * np.maximum(padded - 64, 0)


def _example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(budgets, expected tokens, step time in ms) of every budget."""
    spread = np.linspace(0.55, 0.95, _REQUESTS, dtype=np.float32)
    alive = survival(np.tile(spread, (_WIDTH, 1)))
    ranking = rank(alive, np.full(_REQUESTS, _WIDTH))
    budgets = np.arange(_REQUESTS * _WIDTH + 1)
    tokens = _REQUESTS + np.concatenate([[0.0], ranking.gains(budgets[1:])])
    return budgets, tokens, _price_ms(_REQUESTS + budgets) + _DRAFT_MS


def decision_svg() -> str:
    """Price, expected tokens and goodput over the budget, with the choice marked."""
    budgets, tokens, ms = _example()
    goodput = tokens / ms
    edges = [i for i in budgets[:-1] if ms[i + 1] > ms[i]] + [int(budgets[-1])]
    best = max(edges, key=lambda i: goodput[i])
    skip = _REQUESTS / (ms[0] - _DRAFT_MS)
    canvas = Canvas(760, 300)
    panels = [
        ("step time T + D, ms", ms, (6.0, 20.0), [8.0, 12.0, 16.0, 20.0]),
        ("expected tokens", tokens, (0.0, 160.0), [0.0, 50.0, 100.0, 150.0]),
        ("goodput, tokens per ms", goodput, (2.0, 11.0), [2.0, 5.0, 8.0, 11.0]),
    ]
    for column, (title, values, limits, ticks) in enumerate(panels):
        panel = Panel(canvas, 45 + 250 * column, 45, 190, 180, (0, float(budgets[-1])), limits)
        panel.frame(title, ticks)
        panel.x_ticks([0, 56, 112, 168, 224], "budget B (drafts verified in the step)")
        line = [panel.at(float(b), float(v)) for b, v in zip(budgets, values, strict=True)]
        canvas.path(line, BLUE)
        for edge in edges:
            canvas.dot(*panel.at(edge, float(values[edge])), GREY, 2.5)
        canvas.dot(*panel.at(best, float(values[best])), ORANGE, 5)
        if column == 2:
            x, y = panel.at(best, float(goodput[best]))
            canvas.text(x, y - 10, f"trim, B = {best}", 12, "middle", ORANGE)
            x, y = panel.at(float(budgets[-1]), float(goodput[-1]))
            canvas.dot(x, y, GREEN, 5)
            canvas.text(x, y + 18, "native", 12, "end", GREEN)
            x, y = panel.at(0, skip)
            canvas.dot(x, y, INK, 5)
            canvas.text(x + 9, y + 4, "no drafts", 12)
    return canvas.svg("The budget is chosen where expected tokens over step time is highest")


_BOXES = {
    "user": (20, 40, 150, 50, "vllm-dspark serve", "or LLM(...)"),
    "config": (20, 150, 150, 66, "config hook", "options, contract,", "worker and scheduler"),
    "metrics": (20, 330, 150, 40, "/metrics"),
    "artifacts": (240, 40, 170, 50, "artifacts/", "cost table, calibration"),
    "planner": (240, 140, 170, 66, "planning/", "survival, calibration,", "cost, budget"),
    "scheduler": (240, 262, 170, 50, "scheduler", "conductor"),
    "runner": (490, 40, 230, 50, "model runner", "one worker per rank"),
    "target": (490, 120, 230, 50, "target forward", "ragged windows"),
    "reject": (490, 200, 230, 50, "rejection", "sampling/, kernels/, cpu/"),
    "draft": (490, 280, 230, 50, "drafter", "proposer/, kernels/, cpu/"),
}
_PROCESSES = (
    (8, 8, 174, 376, "front end process"),
    (228, 8, 194, 376, "engine core process"),
    (478, 8, 254, 376, "worker process"),
)


def architecture_svg() -> str:
    """Which process does what, and what travels between them."""
    canvas = Canvas(744, 430)
    for x, y, w, h, name in _PROCESSES:
        canvas.box(x, y, w, h, "#f5f6fb")
        canvas.text(x + w / 2, y + 20, name, 12, "middle", GREY)
    for x, y, w, h, title, *notes in _BOXES.values():
        canvas.box(x, y, w, h, "white", INK)
        canvas.text(x + w / 2, y + 20, title, 13, "middle")
        for row, note in enumerate(notes):
            canvas.text(x + w / 2, y + 37 + 15 * row, note, 11, "middle", GREY)
    canvas.arrow([(95, 90), (95, 150)])
    canvas.arrow([(170, 200), (205, 200), (205, 275), (240, 275)])
    canvas.arrow([(325, 90), (325, 140)])
    canvas.arrow([(310, 262), (310, 206)])
    canvas.arrow([(340, 206), (340, 262)])
    canvas.arrow([(410, 280), (450, 280), (450, 65), (490, 65)])
    for y in (90, 170, 250):
        canvas.arrow([(605, y), (605, y + 30)])
    canvas.arrow([(605, 330), (605, 352), (360, 352), (360, 312)])
    canvas.arrow([(290, 312), (290, 350), (170, 350)])
    canvas.text(
        445,
        405,
        "scheduler to worker: windows or a budget, on vLLM's scheduler output",
        12,
        "middle",
    )
    canvas.text(
        445,
        422,
        "worker to scheduler, with the next step: tokens, confidences with stamps, step times",
        12,
        "middle",
    )
    return canvas.svg("Processes of an engine with vllm-dspark, and what travels between them")
