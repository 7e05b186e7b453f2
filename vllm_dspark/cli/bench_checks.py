"""What `vllm-dspark bench` refuses before it makes a folder or starts an engine."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from vllm_dspark.bench.modes import BenchError, Mode, PairSpec
from vllm_dspark.bench.recorded import recorded_steps
from vllm_dspark.bench.workload import load_questions
from vllm_dspark.cli.preflight import cached_folder, require_drafter
from vllm_dspark.config import DSparkConfig
from vllm_dspark.demo.target import drafter_path, target_path
from vllm_dspark.errors import DSparkConfigError, InputError

if TYPE_CHECKING:
    from vllm_dspark.cli.bench import BenchOptions

_NOT_IN_PAIR = ("target", "drafter", "replayed")  # options of their own
_AT_LEAST_ONE = ("width", "max_model_len", "max_num_seqs", "kv_cache_bytes")


def check(options: BenchOptions) -> None:
    """Raise BenchError or InputError for options that are wrong from the start."""
    if options.slice_s and (options.share_engines or options.server):
        raise BenchError(
            "--slices lets engines take turns within a cell, which neither modes that share an "
            "engine nor servers can: leave out --share-engines and --server"
        )
    if options.share_engines and options.engine_process and not options.server:
        raise BenchError(
            "--share-engines switches the planner within the worker's process, and with "
            "--engine-process the engine core is in another one: leave out one of the two"
        )
    _check_replays(options)
    for option, command in (("--start-gate", options.gates.start), ("--gate", options.gates.chunk)):
        _check_gate(option, command)
    if options.prompts is not None:
        try:
            load_questions(options.prompts, options.max_prompt_characters)
        except BenchError as error:
            raise InputError(f"--prompts: {error}") from error
    _check_models(options)
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"--out {options.out}: it is a file; name a folder")


def pair_fields(text: str) -> dict[str, Any]:
    """The fields of PairSpec that --pair sets, of the right types; raises BenchError."""
    from pydantic import TypeAdapter, ValidationError

    allowed = {f.name for f in dataclasses.fields(PairSpec)} - set(_NOT_IN_PAIR)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"--pair {text!r} is not JSON: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= allowed:
        raise BenchError(f"--pair {text!r}: a JSON object with keys of {sorted(allowed)}")
    kinds = get_type_hints(PairSpec)
    for name, value in found.items():
        try:
            TypeAdapter(kinds[name]).validate_python(value, strict=True)
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"]
            raise BenchError(f"--pair: {name} = {value!r}: {why}") from error
    try:
        DSparkConfig.from_mapping(found.get("plugin_options", {}))
    except DSparkConfigError as error:
        raise BenchError(f"--pair: plugin_options: {error}") from error
    for name in _AT_LEAST_ONE:
        value = found.get(name)
        if value is not None and value < 1:
            raise BenchError(f"--pair: {name} = {value}: it must be at least 1")
    return found


def _check_replays(options: BenchOptions) -> None:
    if not options.replays:
        return
    if options.server:
        raise BenchError(
            "--replay installs itself in engines that the worker starts, and servers are none of "
            "them: leave out --server; --engine-process gives the engine core its own process too"
        )
    if len({path.stem for path in options.replays}) < len(options.replays):
        raise BenchError("--replay: two recordings have one name, which their cells would share")
    for path in options.replays:
        try:
            steps = recorded_steps(path)
        except InputError as error:
            raise BenchError(f"--replay: {error}") from error
        for temperature in options.temperatures:
            if not (steps.sampled == (temperature > 0)).any():
                kind = "sampled" if temperature > 0 else "greedy"
                raise BenchError(
                    f"--replay {path}: it has no {kind} request, which --temperature "
                    f"{temperature:g} needs; leave that out, or record at such a temperature"
                )


def _check_gate(option: str, command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{option} {command!r} is no command: {error}") from error
    if words and shutil.which(words[0]) is None:
        raise InputError(
            f"{option} {command!r}: there is no command {words[0]!r}; give a prefix like "
            "'flock FILE'"
        )


def _check_models(options: BenchOptions) -> None:
    if (options.target is None) != (options.drafter is None):
        raise InputError("--target and --drafter belong together: name both, or neither")
    for option, model in (("--target", options.target), ("--drafter", options.drafter)):
        if model is not None:
            _check_model(option, model)
    target = options.target or str(target_path())
    drafter = options.drafter or str(drafter_path())
    widths = {
        f"--modes {mode.name}": width
        for mode in options.modes
        if (width := _width(mode, options.pair)) is not None
    }
    require_drafter(target, drafter, widths, tensors=options.drafter is None)


def _check_model(option: str, model: str) -> None:
    """Engines of a benchmark start offline: a model is a folder, or in the hub's cache."""
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise InputError(f"{option} {model}: there is no config.json in it")
        return
    if cached_folder(model) is None:
        raise InputError(
            f"{option} {model}: there is no such folder, and the hub's cache has no model of this "
            "name; engines start offline: name a folder, or fetch it first (hf download)"
        )


def _width(mode: Mode, pair: dict[str, Any]) -> int | None:
    """Drafts per step of a mode; None for those without drafts."""
    if mode.name.startswith("off"):
        return None
    return mode.width or int(pair.get("width", PairSpec.width))
