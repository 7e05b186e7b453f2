"""From options and files to a decision taken before the engine is built.

`resolve` answers once, at start-up: is scheduling on, with which table and
calibration, and if not, why. It never lets a questionable artifact through:

    always              files must be readable, of a known version, legal, and for
                        this K; a given calibration that is not raises, since the
                        user asked for something that cannot be done; a given cost
                        table or evidence that is not switches scheduling off
    freshness demanded  on top, all must match the live fingerprint, a cost table
                        must exist already, and positive admission evidence too;
                        whatever is missing or wrong switches scheduling off

A cached table is used only if its fingerprint matches, demanded or not; without one
the engine measures at start-up (`needs_profile`) and saves it for the next start.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_dspark.artifacts.fingerprint import MODEL_FIELDS, Fingerprint
from vllm_dspark.artifacts.schema import AdmissionRecord, CostTableRecord
from vllm_dspark.artifacts.store import (
    ArtifactStore,
    read_admission,
    read_calibration,
    read_cost_table,
)
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import ArtifactError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable
from vllm_dspark.planning.facts import PlannerOptions


@dataclass(frozen=True)
class Resolution:
    """What start-up found; `off_reason` is empty if scheduling is on."""

    off_reason: str
    calibration: Calibration
    cost_table: CostTable | None = None
    needs_profile: bool = False  # measure a cost table and save it
    mixed: bool = False  # evidence allows to trim steps with prefill rows
    notes: tuple[str, ...] = field(default=())  # for the log, one line each
    used: tuple[str, ...] = ()  # artifacts that were found, for the log

    @property
    def scheduling(self) -> bool:
        """Whether verification is scheduled at all."""
        return not self.off_reason


def planner_options(
    config: DSparkConfig,
    resolution: Resolution,
    device_windows: bool,
    choose_width: bool = False,
) -> PlannerOptions:
    """The planner's options from the user's; choose_width: draft passes may be narrow."""
    return PlannerOptions(
        enabled=resolution.scheduling,
        min_gain=config.confidence_min_predicted_gain,
        hysteresis_steps=config.hysteresis_steps,
        drain_guard=config.drain_guard,
        skip_draft=config.skip_draft,
        probe_interval=config.probe_interval,
        request_floor=config.request_floor,
        device_windows=device_windows,
        mixed=resolution.mixed,
        choose_width=choose_width,
        test_windows=config.test_windows,
        test_windows_seed=config.test_windows_seed,
        test_draft_width=config.test_draft_width if choose_width else None,
    )


def resolve(config: DSparkConfig, live: Fingerprint, store: ArtifactStore) -> Resolution:
    """Decide; raises ArtifactError only for a calibration the user named (see above)."""
    width = live.num_speculative_tokens
    identity = Calibration.identity(width)
    if not config.enabled:
        return Resolution("the plugin is disabled ('enabled': false)", identity)
    if config.scheduling is False:
        return Resolution("scheduling is disabled ('scheduling': false)", identity)
    if width == 1:
        return Resolution("with num_speculative_tokens = 1 there is nothing to trim", identity)
    if live.data_parallel > 1:
        return Resolution(
            f"data_parallel_size = {live.data_parallel}: ranks cannot agree on a plan yet", identity
        )
    try:
        found = _calibration(config, live, store)
        found = _cost_table(config, live, store, found)
        return _evidence(config, live, found)
    except _RefusedError as refusal:
        return Resolution(str(refusal), identity)


class _RefusedError(Exception):
    """Scheduling is off, for the reason given."""


def _calibration(config: DSparkConfig, live: Fingerprint, store: ArtifactStore) -> Resolution:
    strict, width = config.validate_confidence_artifact_freshness, live.num_speculative_tokens
    identity = Calibration.identity(width)
    if config.calibration is None:
        try:
            cached = store.load_calibration(live)
        except ArtifactError as error:
            return Resolution("", identity, notes=(f"cached calibration ignored: {error}",))
        if cached is None:
            return Resolution("", identity)
        used = (f"calibration {store.calibration_path(live)}",)
        return Resolution("", cached.to_calibration(), used=used)
    try:
        record = read_calibration(config.calibration, width)
    except ArtifactError as error:
        if strict:
            raise _RefusedError(str(error)) from error
        raise
    differences = (
        ["it carries no fingerprint"]
        if record.fingerprint is None
        else record.fingerprint.differences(live, MODEL_FIELDS)
    )
    notes = _match(f"calibration {config.calibration}", differences, strict)
    used = (f"calibration {config.calibration}",)
    return Resolution("", record.to_calibration(), notes=notes, used=used)


def _cost_table(
    config: DSparkConfig, live: Fingerprint, store: ArtifactStore, found: Resolution
) -> Resolution:
    strict = config.validate_confidence_artifact_freshness
    record: CostTableRecord | None
    if config.cost_table is not None:
        try:
            record = read_cost_table(config.cost_table)
        except ArtifactError as error:
            raise _RefusedError(str(error)) from error
        recorded = record.fingerprint.num_speculative_tokens
        if recorded != live.num_speculative_tokens:
            raise _RefusedError(
                f"cost table {config.cost_table} was measured for {recorded} drafts, "
                f"num_speculative_tokens is {live.num_speculative_tokens}"
            )
        differences = record.fingerprint.differences(live)
        notes = _match(f"cost table {config.cost_table}", differences, strict)
        used = (*found.used, f"cost table {config.cost_table}")
        return replace(found, cost_table=record.to_table(), notes=found.notes + notes, used=used)
    try:
        record = store.load_cost_table(live)
    except ArtifactError as error:
        record = None
        found = replace(found, notes=(*found.notes, f"cached cost table ignored: {error}"))
    if record is not None:
        used = (*found.used, f"cost table {store.cost_table_path(live)}")
        return replace(found, cost_table=record.to_table(), used=used)
    if strict:
        raise _RefusedError(
            f"no cost table for this machine and model in {store.folder}; measure one with "
            "`vllm-dspark profile`"
        )
    return replace(found, needs_profile=True)


def _evidence(config: DSparkConfig, live: Fingerprint, found: Resolution) -> Resolution:
    strict = config.validate_confidence_artifact_freshness
    if config.admission_evidence is not None:
        record = _admission(config.admission_evidence, "decode")
        differences = record.fingerprint.differences(live)
        if not record.positive:
            differences.append(f"gain is not positive (at least {record.gain_low:+.1%})")
        notes = _match(f"admission evidence {config.admission_evidence}", differences, strict)
        found = replace(found, notes=found.notes + notes)
    elif strict:
        raise _RefusedError("no admission evidence is named ('admission_evidence')")
    if config.confidence_mixed_evidence is None:
        return found
    if config.confidence_mixed_evidence == "auto":
        if config.online_cost:
            return replace(found, mixed=True)
        note = (
            'steps with prefill rows stay native: "confidence_mixed_evidence": "auto" prices them '
            'by served steps, which "online_cost": false leaves unmeasured; allow online_cost'
        )
        return replace(found, notes=(*found.notes, note))
    # Mixed steps are native unless proven otherwise, so this evidence is always checked
    # in full; without it decode-only steps are still scheduled.
    try:
        record = _admission(config.confidence_mixed_evidence, "mixed")
        differences = record.fingerprint.differences(live)
        if record.positive and not differences:
            return replace(found, mixed=True)
        why = "; ".join(differences) or "its gain is not positive"
    except _RefusedError as refusal:
        why = str(refusal)
    note = f"steps with prefill rows stay native: {config.confidence_mixed_evidence}: {why}"
    return replace(found, notes=(*found.notes, note))


def _admission(path: Path, scope: str) -> AdmissionRecord:
    try:
        record = read_admission(path)
    except ArtifactError as error:
        raise _RefusedError(str(error)) from error
    if record.scope != scope:
        raise _RefusedError(f"{path} is evidence about {record.scope} steps, wanted {scope}")
    return record


def _match(what: str, differences: list[str], strict: bool) -> tuple[str, ...]:
    """A note about differences, or a refusal if freshness is demanded."""
    if not differences:
        return ()
    text = f"{what} is not from this machine and model: {'; '.join(differences)}"
    if strict:
        raise _RefusedError(text)
    return (text,)
