"""What a check says, and what all of them together mean for the exit code."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "info", "warning", "error")
# Exit code of the worst level (cli/exits.py).
EXIT_CODES: dict[Level, int] = {"ok": 0, "info": 0, "warning": 4, "error": 1}


@dataclass(frozen=True)
class Finding:
    """One result. `check` is a stable name.

    flag: the remedy, with the flag, option or command to give; empty if nothing is to do.
    """

    check: str
    level: Level
    message: str
    reason: str = ""
    flag: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> "Report":
        """From the findings of all checks."""
        return cls(tuple(findings))

    @property
    def worst(self) -> Level:
        """The worst level; `ok` if there are no findings."""
        return max((f.level for f in self.findings), key=LEVELS.index, default="ok")

    @property
    def exit_code(self) -> int:
        """0: nothing to do, 4: warnings, 1: errors."""
        return EXIT_CODES[self.worst]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        counts = {level: sum(f.level == level for f in self.findings) for level in LEVELS}
        return {
            "kind": "doctor",
            "version": 1,
            "worst": self.worst,
            "exit_code": self.exit_code,
            "counts": counts,
            "findings": [asdict(finding) for finding in self.findings],
        }
