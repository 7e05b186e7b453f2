"""Options of the ``"dspark": {...}`` object inside vLLM's speculative config.

    --speculative-config '{"method": "dspark", "model": "DRAFTER",
                           "num_speculative_tokens": 7, "dspark": {"windows": "host"}}'

``DSparkConfig.from_mapping`` is the only way in: it raises ``DSparkConfigError``
naming the option, the value seen and what is allowed. The option reference of
the documentation is generated from ``option_reference()``. This is also the only
module that reads environment variables.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.config import JsonDict

from vllm_dspark.errors import DSparkConfigError

CACHE_ENV = "VLLM_DSPARK_CACHE_DIR"
# Options that name a file which the engine core writes while it serves.
RECORDINGS = ("record_outcomes", "record_confidences")


def _option(default: object, description: str, allowed: str, **constraints: Any) -> Any:
    """A pydantic field that also says, for errors and docs, what it accepts."""
    extra: JsonDict = {"allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def _as_path(value: object) -> object:
    """Accept a non-empty string where a path is wanted (JSON has no paths)."""
    if isinstance(value, str) and value:
        try:
            return Path(value).expanduser()
        except RuntimeError:  # no such user: left as it is, and refused by its type
            return value
    return value


def _as_tuple(value: object) -> object:
    """JSON lists become tuples, so that a frozen config is immutable throughout."""
    return tuple(value) if isinstance(value, list) else value


_OptionalPath = Annotated[Path | None, BeforeValidator(_as_path)]
# As a path would be; a file of this name is "./auto".
_Evidence = Annotated[
    Literal["auto"] | Path | None, BeforeValidator(lambda v: v if v == "auto" else _as_path(v))
]
_Window = Annotated[int, Field(ge=1)]
_TestWindows = Annotated[
    Literal["full", "random"]
    | _Window
    | Annotated[tuple[_Window, ...], Field(min_length=1)]
    | None,
    BeforeValidator(_as_tuple),
]
_TestWidth = Annotated[
    Literal["random"] | _Window | Annotated[tuple[_Window, ...], Field(min_length=1)] | None,
    BeforeValidator(_as_tuple),
]
_PATH = "a file path, or null"


class DSparkConfig(BaseModel):
    """Validated, immutable options of one engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    enabled: bool = _option(
        True,
        "Load the plugin for this engine. Off means vLLM exactly as installed.",
        "true or false",
    )
    windows: Literal["auto", "host", "device"] = _option(
        "auto",
        "Who executes a plan: the scheduler, which schedules fewer drafts (host), or the "
        "worker, which rewrites lengths inside the step (device). auto follows the backend.",
        '"auto", "host" or "device"',
    )
    kernels: Literal["auto", "triton", "reference"] = _option(
        "auto",
        "Triton kernels, or their PyTorch references. auto takes Triton on a GPU.",
        '"auto", "triton" or "reference"',
    )
    scheduling: bool | Literal["auto"] = _option(
        "auto",
        "Confidence-scheduled verification. auto schedules when the drafter has a confidence "
        "head and a usable cost table; false always verifies full windows.",
        'true, false or "auto"',
    )
    confidence_min_predicted_gain: float = _option(
        0.04,
        "Predicted relative gain in tokens per second that a trimmed or undrafted step needs "
        "over the native full-width one.",
        "a number >= 0 and < 1",
        ge=0.0,
        lt=1.0,
    )
    hysteresis_steps: int = _option(
        4,
        "Consecutive steps for which another kind of step must look better before it is "
        "entered; leaving for native takes one.",
        "an integer from 0 to 1000",
        ge=0,
        le=1000,
    )
    drain_guard: bool = _option(
        True,
        "Near the end of a batch, charge trimming for the delay of the last requests.",
        "true or false",
    )
    skip_draft: bool = _option(
        True,
        "Let the scheduler leave out drafting when verifying nothing is fastest; the drafter's "
        "context KV is still written.",
        "true or false",
    )
    draft_width: Literal["auto", "full"] = _option(
        "auto",
        "Columns of a draft pass: as many as are expected to pay in the next step, where the "
        "engine supports it and the cost table has narrower passes (auto), or always "
        "num_speculative_tokens (full).",
        '"auto" or "full"',
    )
    probe_interval: int = _option(
        32,
        "While drafting is skipped, draft once in this many steps to notice that it pays again; "
        "while draft passes are narrow, draft full width as often.",
        "an integer from 2 to 100000",
        ge=2,
        le=100_000,
    )
    request_floor: int = _option(
        0,
        "Drafts that every request keeps in a trimmed step, whatever their confidence.",
        "an integer from 0 to num_speculative_tokens",
        ge=0,
    )
    cost_table: _OptionalPath = _option(
        None, "Cost table to use instead of the cached or freshly measured one.", _PATH
    )
    calibration: _OptionalPath = _option(
        None,
        "Calibration of the confidence head; files of other engines with "
        '"temperatures" or "sts_temperatures" are read too.',
        _PATH,
    )
    admission_evidence: _OptionalPath = _option(
        None, "Record showing that scheduling gained on the intended workload.", _PATH
    )
    cache_dir: _OptionalPath = _option(
        None,
        f"Folder of cached artifacts; null takes ${CACHE_ENV}, else the user's cache folder.",
        "a folder path, or null",
    )
    validate_confidence_artifact_freshness: bool = _option(
        False,
        "Demand that artifacts match this machine's live fingerprint and that admission "
        "evidence is positive; otherwise scheduling is off from the start.",
        "true or false",
    )
    confidence_mixed_evidence: _Evidence = _option(
        None,
        'Evidence that scheduling steps with prefill chunks pays; "auto" schedules them once '
        "enough were timed in this run to price them; null keeps those steps native.",
        'a file path, "auto", or null',
    )
    online_calibration: bool = _option(
        True, "Correct the calibration while serving, within bounds.", "true or false"
    )
    online_cost: bool = _option(
        True, "Correct the cost table with measured step times, within bounds.", "true or false"
    )
    cost_drift_limit: float = _option(
        0.25,
        "Relative drift of a measured step time from the cost table that is reported.",
        "a number > 0 and <= 10",
        gt=0.0,
        le=10.0,
    )
    metrics: bool = _option(True, "Publish vllm:dspark_* metrics.", "true or false")
    log_interval_s: float = _option(
        60.0,
        "Seconds between summary log lines; 0 writes none.",
        "a number from 0 to 86400",
        ge=0.0,
        le=86_400.0,
    )
    record_outcomes: _OptionalPath = _option(
        None, "Append one JSON line per step outcome to this file (debugging, simulation).", _PATH
    )
    record_confidences: _OptionalPath = _option(
        None,
        "Append raw confidences with the outcomes of their drafts to this file (calibration, "
        "simulation).",
        _PATH,
    )
    test_windows: _TestWindows = _option(
        None,
        "Debugging: replace the planner's windows by full ones, by seeded random ones, by one "
        "size, or by a list that request i of step s enters at position s + i.",
        '"full", "random", a window from 1 to num_speculative_tokens + 1, a list of windows, '
        "or null",
    )
    test_draft_width: _TestWidth = _option(
        None,
        "Debugging: draft so many columns whatever the planner finds, seeded random ones per "
        "step, or those of a list in turn.",
        '"random", a width from 1 to num_speculative_tokens, a list of widths, or null',
    )
    test_windows_seed: int = _option(
        0,
        'Seed of `"random"` windows and draft widths.',
        "an integer >= 0 and < 2**32",
        ge=0,
        lt=2**32,
    )

    @classmethod
    def from_mapping(cls, obj: object, num_speculative_tokens: int | None = None) -> "DSparkConfig":
        """Validate a JSON object; with a draft width given, check options against it too."""
        if isinstance(obj, DSparkConfig):
            config = obj
        elif obj is None:
            config = cls()
        elif not isinstance(obj, Mapping):
            raise DSparkConfigError(
                f'"dspark" in the speculative config must be a JSON object, not {obj!r}; '
                'write for example "dspark": {"windows": "host"}'
            )
        else:
            try:
                config = cls.model_validate(dict(obj))
            except ValidationError as error:
                raise DSparkConfigError(_explain(error, obj)) from None
        if num_speculative_tokens is not None:
            config._check_width(num_speculative_tokens)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Options that differ from their defaults, as JSON types; inverse of from_mapping."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def resolved_cache_dir(self) -> Path:
        """Folder of cached artifacts: option, then environment, then the user's cache."""
        return self.cache_dir if self.cache_dir is not None else default_cache_dir()

    def _check_width(self, num_speculative_tokens: int) -> None:
        if self.request_floor > num_speculative_tokens:
            raise DSparkConfigError(
                f"dspark.request_floor = {self.request_floor} exceeds "
                f"num_speculative_tokens = {num_speculative_tokens}; "
                f"allowed: 0 to {num_speculative_tokens}"
            )
        for name, spec, most in (
            ("test_windows", self.test_windows, num_speculative_tokens + 1),
            ("test_draft_width", self.test_draft_width, num_speculative_tokens),
        ):
            sizes = (spec,) if isinstance(spec, int) else spec
            if isinstance(sizes, tuple) and max(sizes) > most:
                given = spec if isinstance(spec, int) else list(sizes)  # JSON has no tuples
                raise DSparkConfigError(
                    f"dspark.{name} = {given!r} exceeds what num_speculative_tokens = "
                    f"{num_speculative_tokens} allows; allowed: 1 to {most}"
                )


def prometheus_multiproc_folder() -> Path | None:
    """Folder that several API servers share their metrics in (prometheus_client's variable)."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(folder) if folder else None


@dataclass(frozen=True)
class OptionDoc:
    """One row of the generated option reference."""

    name: str
    default: str  # as JSON would write it
    allowed: str
    description: str


def option_reference() -> list[OptionDoc]:
    """All options in declaration order, for the documentation."""
    defaults = DSparkConfig().model_dump_json(indent=0).splitlines()[1:-1]
    written = dict(line.rstrip(",").split(":", 1) for line in defaults)
    return [
        OptionDoc(name, written[f'"{name}"'].strip(), _allowed(name), field.description or "")
        for name, field in DSparkConfig.model_fields.items()
    ]


def _allowed(name: str) -> str:
    extra = DSparkConfig.model_fields[name].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else "see the documentation"


def _explain(error: ValidationError, given: Mapping[str, Any]) -> str:
    """One line per offending option: name, value as given, what is allowed."""
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        name = str(item["loc"][0])
        if name not in DSparkConfig.model_fields:
            lines[name] = f"dspark.{name} = {item['input']!r}: unknown option{_suggest(name)}"
        elif name not in lines:  # a union reports once per alternative
            # as given: validators before the check have turned lists into tuples
            lines[name] = f"dspark.{name} = {given[name]!r}; allowed: {_allowed(name)}"
    return "\n".join(lines.values())


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, DSparkConfig.model_fields, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; options are " + ", ".join(sorted(DSparkConfig.model_fields))


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for child processes to start from."""
    return dict(os.environ)


def default_cache_dir() -> Path:
    """Folder of artifacts and the demo target: `$VLLM_DSPARK_CACHE_DIR`, else the user's cache."""
    if chosen := os.environ.get(CACHE_ENV, "").strip():
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm-dspark"
