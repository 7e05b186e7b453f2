"""Checks of paths: a target that is not there, files and folders that the engine will write."""

from collections.abc import Iterator

from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Subject, missing_path
from vllm_dspark.cli.doctor.trial import why_not_made
from vllm_dspark.config import RECORDINGS
from vllm_dspark.demo.target import MODEL_NAME

_EXISTING = "vllm-dspark serve TARGET: an existing folder, or a hub id OWNER/NAME"


def check_target_files(subject: Subject) -> Iterator[Finding]:
    """A target named by a path that leads nowhere, or by a name that no hub has."""
    target = subject.arguments.target
    if missing_path(target):
        yield Finding(
            "target_files",
            "error",
            f"the folder {target} does not exist",
            "vLLM would take the path for a hub id, and fail",
            _EXISTING,
        )
    elif subject.target_is_nowhere:
        demo = target.startswith(MODEL_NAME)
        yield Finding(
            "target_files",
            "error",
            f"{target} is no folder here, and no hub id OWNER/NAME",
            "vLLM would look for it in the hub, and fail",
            '"$(python -m vllm_dspark.demo.target)" as TARGET (made on first use)'
            if demo
            else _EXISTING,
        )


def check_written_files(subject: Subject) -> Iterator[Finding]:
    """Recordings, without which the engine does not start, and the cache, without which it does."""
    options = subject.options
    if options is None or not options.enabled:
        return
    for name in RECORDINGS:
        path = getattr(options, name)
        if path is not None and (why := why_not_made(path)):
            yield Finding(
                "recording",
                "error",
                f"{name} = {str(path)!r} cannot be written: {why}",
                "the engine would not start",
                f'"{name}" in "dspark": a file in a folder that the engine may write to',
            )
    folder = options.resolved_cache_dir()
    if options.scheduling is not False and (why := why_not_made(folder / "cost-table.json")):
        yield Finding(
            "cache_folder",
            "warning",
            f"the cache folder {folder} cannot be written: {why}",
            "a cost table measured at start-up is used but not kept: every start measures again",
            '"cache_dir" in "dspark", or VLLM_DSPARK_CACHE_DIR: a folder that can be written',
        )
