"""Where a drafter's files are: a local folder, or the hub's cache (downloaded if need be)."""

import logging
from pathlib import Path

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.inventory import INDEX, SINGLE
from vllm_dspark.proposer.keys import read_json

logger = logging.getLogger("vllm.vllm_dspark")


def local_folder(
    model: str, revision: str | None, cache: str | None, weights: bool = True
) -> Path | None:
    """The folder that holds a checkpoint's config and, if `weights`, its safetensors files.

    model: a folder or a hub id; vLLM is about to fetch the same files into the same cache. None
    when the hub does not give them (offline, misspelt, no safetensors): vLLM says so itself.
    """
    if Path(model).is_dir():
        return Path(model)
    config = _fetch(model, "config.json", revision, cache)
    if config is None:
        return None
    if not weights:
        return config.parent
    index = _fetch(model, INDEX, revision, cache)
    if index is None:
        return config.parent if _fetch(model, SINGLE, revision, cache) else None
    shards = read_json(index, "a checkpoint").get("weight_map")
    if not isinstance(shards, dict):
        raise DrafterError(f"{index}: 'weight_map' must map tensor names to files")
    found = [_fetch(model, str(shard), revision, cache) for shard in sorted(set(shards.values()))]
    return config.parent if all(found) else None


def _fetch(model: str, file: str, revision: str | None, cache: str | None) -> Path | None:
    """One file of a hub repository, in the cache; None if there is no such file to be had."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            model, file, revision=revision, cache_dir=cache,
            _raise_exceptions_for_missing_entries=False,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        logger.info("vllm-dspark: %s of %s is not at hand: %s", file, model, error)
        return None
    return Path(path) if path else None
