"""`vllm-dspark calibrate`: how far to trust a drafter's confidences, fitted on prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vllm_dspark.artifacts.fingerprint import Fingerprint
from vllm_dspark.artifacts.pairs import Pair, read_pairs
from vllm_dspark.artifacts.schema import CalibrationRecord, PositionRecord
from vllm_dspark.artifacts.store import ArtifactStore, read_calibration, write_record
from vllm_dspark.cli.figures import calibration_figures
from vllm_dspark.cli.output import progress, require_writable
from vllm_dspark.cli.prompt_files import PromptSet, load_prompts
from vllm_dspark.cli.replicas import CalibrationReplica, PairsOfTask, Request
from vllm_dspark.cli.spread import (
    LocalReplica,
    RayPlace,
    Replicas,
    make_replicas,
    one_identity,
    require_cache,
)
from vllm_dspark.errors import InputError, UntrustedError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.reliability import (
    METHODS,
    ClassFit,
    Pairs,
    PositionFit,
    combine,
    fit_class,
    held_out_prompts,
    judge_class,
    shortage,
)

CLASSES = ("greedy", "sampled")


@dataclass(frozen=True)
class CalibrateOptions:
    """What the command line says."""

    arguments: tuple[str, ...]  # of `vllm serve`
    prompts: Path | None = None  # None: the packaged samples
    field: str | None = None
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    held_out: float = 0.5
    seed: int = 0
    min_outcomes: int = 20
    method: str = "auto"  # one of reliability.METHODS
    chat: bool = True
    recording: Path | None = None  # fit from this file instead of running an engine
    against: Path | None = None  # a calibration to judge beside
    output: Path | None = None
    ray: RayPlace | None = None
    task_size: int = 16  # requests of one task of a replica, at least


@dataclass(frozen=True)
class CalibrateReport:
    """What was fitted; `to_json` is what `--json` writes and `plot` draws."""

    record: CalibrationRecord
    fits: Mapping[str, ClassFit]
    against: Mapping[str, tuple[PositionFit, ...]]
    facts: Mapping[str, Any]
    paths: tuple[str, ...]

    def to_json(self) -> str:
        """One JSON object."""
        classes = {
            name: _class_json(fit, self.against.get(name)) for name, fit in self.fits.items()
        }
        return json.dumps(
            {
                "command": "calibrate",
                "version": 1,
                **self.facts,
                "artifacts": list(self.paths),
                "classes": classes,
                "calibration": self.record.model_dump(mode="json"),
                "figures": calibration_figures(self.fits),
            },
            indent=1,
        )


def _class_json(fit: ClassFit, against: Sequence[PositionFit] | None) -> dict[str, Any]:
    positions = []
    for index, item in enumerate(fit.positions):
        row = PositionRecord.of(item.before, item.after).model_dump(mode="json")
        row["ece_floor"] = item.ece_floor
        row["ece_sts"] = fit.ece_sts[index] if fit.ece_sts else None
        if against is not None:
            row["ece_against"] = against[index].after.ece
            row["brier_against"] = against[index].after.brier
        positions.append(row)
    return {
        "rows_fit": fit.num_fit,
        "rows_held_out": fit.num_held_out,
        "method": fit.method,
        "temperatures": list(fit.temperatures),
        "offsets": list(fit.offsets),
        "positions": positions,
    }


@dataclass(frozen=True)
class _Collected:
    """Pairs by prompt index, whichever way they were obtained."""

    pairs: list[tuple[int, Pair]]
    num_prompts: int
    identity: dict[str, Any] | None  # of the engine; None for a recording of unknown models
    facts: dict[str, Any]
    # Keeps a record in the cache of every machine that took part; returns the paths.
    save: Callable[[CalibrationRecord], list[str]]


def run_calibrate(options: CalibrateOptions, console: Console) -> CalibrateReport:
    """Collect, fit, judge and save. UntrustedError: too little data, nothing was saved."""
    check(options)
    with _collecting(options, console) as collected:
        return _fitted(collected, options)


def _collecting(options: CalibrateOptions, console: Console) -> AbstractContextManager[_Collected]:
    if options.recording is not None:
        return nullcontext(_from_recording(options.recording, options.arguments))
    prompts = load_prompts(options.prompts, options.field, options.limit, options.seed)
    return _from_engine(options, prompts, console)


def _fitted(collected: _Collected, options: CalibrateOptions) -> CalibrateReport:
    classes, notes = pairs_by_class(collected.pairs)
    width = next(iter(classes.values())).num_positions
    against = read_calibration(options.against, width) if options.against else None
    held_out = held_out_prompts(collected.num_prompts, options.held_out, options.seed)
    fits = _fit(classes, held_out, options)
    compared = {}
    if against is not None:
        other = against.to_calibration()
        compared = {
            name: judge_class(
                classes[name].select(held_out[classes[name].prompt]),
                getattr(other, name),
                getattr(other, f"{name}_offset"),
            )
            for name in fits
        }
    calibration = combine(fits.get("greedy"), fits.get("sampled"), width)
    record = _record(calibration, fits, collected)
    facts = {
        **collected.facts,
        "prompts": max(len(np.unique(pairs.prompt)) for pairs in classes.values()),
        "held_out": options.held_out,
        "seed": options.seed,
        "notes": notes,
    }
    paths = collected.save(record)
    if options.output is not None:
        write_record(options.output, record)
        paths.append(str(options.output))
    return CalibrateReport(record, fits, compared, facts, tuple(paths))


def check(options: CalibrateOptions) -> None:
    """Raise InputError for options that are wrong from the start."""
    if options.recording is not None and not options.recording.is_file():
        why = "it is a folder" if options.recording.is_dir() else "there is no such file"
        raise InputError(f"--recording: cannot read {options.recording}: {why}")
    if options.prompts is not None and not options.prompts.exists():
        raise InputError(
            f"--prompts: {options.prompts} is neither a JSONL file nor a dataset folder: there is "
            "nothing of this name"
        )
    require_writable(options.output, "--output")
    if options.against is not None and not options.against.is_file():
        raise InputError(f"cannot read {options.against}: no such file")
    if not 0.0 < options.held_out < 1.0:
        raise InputError(f"--held-out {options.held_out}: give a share between 0 and 1")
    if options.method not in METHODS:
        raise InputError(f"--fit {options.method}: choose {', '.join(METHODS)}")
    bad = [t for t in options.temperatures if not (math.isfinite(t) and t >= 0.0)]
    if bad or not options.temperatures:
        raise InputError(f"--temperature {bad or 'missing'}: temperatures are finite and >= 0")
    if options.recording is not None and not options.arguments and options.output is None:
        raise InputError(
            "a recording does not say which models it is about, so its calibration has no place in "
            "the cache; name the models as for `vllm serve`, or a file with --output (option "
            "'calibration' of the plugin takes it)"
        )


# ---- collecting


def _from_recording(path: Path, arguments: Sequence[str]) -> _Collected:
    width, pairs = read_pairs(path)
    identity = None
    if arguments:
        from vllm_dspark.integration.offline import describe_arguments

        identity = describe_arguments(arguments)
        if identity["num_speculative_tokens"] != width:
            raise InputError(
                f"{path} was recorded with {width} drafts, num_speculative_tokens is "
                f"{identity['num_speculative_tokens']}"
            )
    index: dict[str, int] = {}
    rows = [(index.setdefault(pair.request_id, len(index)), pair) for pair in pairs]
    facts: dict[str, Any] = {"source": str(path)}
    if identity is not None:
        facts |= {"model": identity["model"], "drafter": identity["drafter"]}

    def save(record: CalibrationRecord) -> list[str]:
        if identity is None:
            return []
        return [str(ArtifactStore(Path(identity["cache_dir"])).save(record))]

    return _Collected(rows, len(index), identity, facts, save)


@contextmanager
def _from_engine(
    options: CalibrateOptions, prompts: PromptSet, console: Console
) -> Iterator[_Collected]:
    requests = [
        Request(index, content, temperature, options.max_tokens)
        for index, content in enumerate(prompts.contents)
        for temperature in options.temperatures
    ]
    console.print("starting the engine ...")
    factory = (options.arguments, options.chat)
    with make_replicas(options.ray, CalibrationReplica, factory) as replicas:
        identity = one_identity(replicas.describe())
        require_cache(identity, options.ray)
        console.print(
            f"{len(requests)} requests: {len(prompts.contents)} prompts of {prompts.source} at "
            f"temperatures {', '.join(f'{t:g}' for t in options.temperatures)}, up to "
            f"{options.max_tokens} tokens each",
            highlight=False,
        )
        done = list(_generate(replicas, requests, options.task_size, console))
        pairs = [pair for part in done for pair in part.pairs]
        too_long = {index for part in done for index in part.too_long}
        facts = {
            "model": identity["model"],
            "drafter": identity["drafter"],
            "source": prompts.source,
            "field": prompts.field,
            "temperatures": list(options.temperatures),
            "max_tokens": options.max_tokens,
            "tokens": sum(part.num_tokens for part in done),
            "prompts_too_long": len(too_long),
            "restarts": replicas.restarts,
        }

        def save(record: CalibrationRecord) -> list[str]:
            return sorted(set(replicas.broadcast("save", record.model_dump_json())))

        yield _Collected(pairs, len(prompts.contents), identity, facts, save)


def _generate(
    replicas: Replicas, requests: list[Request], task_size: int, console: Console
) -> Iterable[PairsOfTask]:
    with progress(console) as bars:
        bar = bars.add_task("generating", total=len(requests), note="")
        if isinstance(replicas, LocalReplica):
            # One task: the batch stays full until the last requests.
            yield replicas.replica.run(requests, lambda _: bars.advance(bar))
            return
        # Eight tasks per replica even the load out; fewer would leave replicas idle at the end.
        size = max(task_size, len(requests) // (8 * replicas.count))
        tasks = [requests[i : i + size] for i in range(0, len(requests), size)]
        parts: dict[int, PairsOfTask] = {}
        for index, part in replicas.map(tasks):
            parts[index] = part
            bars.update(bar, advance=len(tasks[index]), note=f"{replicas.count} replicas")
        yield from (parts[index] for index in sorted(parts))


# ---- fitting


def pairs_by_class(pairs: Sequence[tuple[int, Pair]]) -> tuple[dict[str, Pairs], list[str]]:
    """Pairs that may teach, per request class; and what was left out."""
    notes, classes = [], {}
    touched = sum(1 for _, pair in pairs if not pair.untouched)
    invalid = sum(1 for _, pair in pairs if not _is_legal(pair))
    if touched:
        notes.append(f"{touched} rows left out: a grammar or penalty altered what was accepted")
    if invalid:
        notes.append(f"{invalid} rows left out: a confidence is no probability")
    for name in CLASSES:
        rows = [
            (index, pair)
            for index, pair in pairs
            if pair.sampled == (name == "sampled") and pair.untouched and _is_legal(pair)
        ]
        if rows:
            classes[name] = Pairs(
                confidence=np.array([pair.confidence for _, pair in rows], dtype=np.float64),
                verified=np.array([pair.verified for _, pair in rows], dtype=np.int64),
                accepted=np.array([pair.accepted for _, pair in rows], dtype=np.int64),
                prompt=np.array([index for index, _ in rows], dtype=np.int64),
            )
    if not classes:
        raise UntrustedError(
            "no pair of confidences and outcomes was recorded: has the drafter a confidence head, "
            "and were more than a few tokens generated?"
        )
    return classes, notes


def _is_legal(pair: Pair) -> bool:
    return all(0.0 <= value <= 1.0 for value in pair.confidence)


def _fit(
    classes: Mapping[str, Pairs], held_out: Any, options: CalibrateOptions
) -> dict[str, ClassFit]:
    lacking = {
        name: why
        for name, pairs in classes.items()
        if (why := shortage(pairs, held_out, options.min_outcomes))
    }
    if lacking:
        told = "; ".join(f"{name}: {why}" for name, why in lacking.items())
        raise UntrustedError(
            f"too little data: {told}. Nothing was saved. Give more prompts (--prompts, --limit) "
            "or longer answers (--max-tokens); a class can be left out with --temperature"
        )
    return {name: fit_class(pairs, held_out, options.method) for name, pairs in classes.items()}


def _record(
    calibration: Calibration, fits: Mapping[str, ClassFit], collected: _Collected
) -> CalibrationRecord:
    identity = collected.identity
    fingerprint = Fingerprint.model_validate(identity["fingerprint"]) if identity else None
    quality = {
        f"{name}_quality": tuple(PositionRecord.of(p.before, p.after) for p in fit.positions)
        for name, fit in fits.items()
    }
    return CalibrationRecord.from_calibration(
        calibration,
        fingerprint,
        dataset=str(collected.facts["source"]),
        num_samples=sum(fit.num_fit for fit in fits.values()),
        **quality,
    )
