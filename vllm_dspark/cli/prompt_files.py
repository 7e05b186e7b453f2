"""Prompts for `calibrate`: a JSONL file, a Hugging Face dataset folder, or the packaged samples."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.demo.prompts import DOMAINS, prompts_of
from vllm_dspark.errors import InputError

Content = str | tuple[tuple[str, str], ...]

# Fields that hold the prompt in common data sets, in this order of preference.
FIELDS = ("prompt", "messages", "conversation", "question", "instruction", "turns", "text")


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they came from. `field` is empty for the packaged samples."""

    source: str
    field: str
    contents: tuple[Content, ...]


def load_prompts(
    path: Path | None, field: str | None = None, limit: int | None = None, seed: int = 0
) -> PromptSet:
    """All prompts, or a random `limit` of them; InputError for anything that holds none."""
    if path is None:
        found = PromptSet("the packaged samples", "", _samples())
    elif path.is_dir():
        found = _from_rows(_dataset_rows(path), path, field)
    elif path.exists():  # a pipe and a device too
        found = _from_rows(_jsonl_rows(path), path, field)
    else:
        raise InputError(f"{path} is neither a JSONL file nor a dataset folder")
    contents = list(found.contents)
    if limit is not None and limit < len(contents):
        contents = random.Random(seed).sample(contents, limit)
    if len(contents) < 2:
        raise InputError(f"{found.source} holds {len(contents)} prompts; at least 2 are needed")
    return PromptSet(found.source, found.field, tuple(contents))


def _samples() -> tuple[Content, ...]:
    return tuple(prompt.text for domain in DOMAINS for prompt in prompts_of(domain))


def _jsonl_rows(path: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as text: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows


def _dataset_rows(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Rows of a saved dataset, or of a folder with parquet, JSON or CSV files (split `train`)."""
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"{folder} is a folder; reading a Hugging Face dataset needs "
            "`pip install 'vllm-dspark[datasets]'`"
        )
    import datasets

    try:
        if any(folder.glob("**/state.json")) or (folder / "dataset_dict.json").is_file():
            loaded: Any = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{folder} holds no dataset that can be read: {error}") from error
    if isinstance(loaded, Mapping):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    rows: Sequence[Mapping[str, Any]] = loaded
    return rows


def _from_rows(rows: Iterable[Mapping[str, Any]], path: Path, field: str | None) -> PromptSet:
    contents: list[Content] = []
    name = field or ""
    for number, row in enumerate(rows, 1):
        name = name or _field_of(row, path)
        if name not in row:
            raise InputError(f"{path}, row {number} has no field {name!r}; it has {sorted(row)}")
        contents.append(_content(row[name], f"{path}, row {number}, field {name!r}"))
    return PromptSet(str(path), name, tuple(contents))


def _field_of(row: Mapping[str, Any], path: Path) -> str:
    for name in FIELDS:
        if row.get(name):
            return name
    raise InputError(
        f"{path}: none of the fields {sorted(row)} is known to hold prompts "
        f"({', '.join(FIELDS)}); name one with --field"
    )


def _content(value: Any, where: str) -> Content:
    """A text, the first of several turns, or the messages before the first answer."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        first = value[0]
        if isinstance(first, str) and first.strip():
            return first
        messages: list[tuple[str, str]] = []
        for message in value:
            if not isinstance(message, Mapping):
                break
            # OpenAI's names, then ShareGPT's
            role = message.get("role") or _ROLES.get(str(message.get("from")), "")
            text = message.get("content") or message.get("value")
            if role == "assistant":
                break
            if not role or not isinstance(text, str):
                raise InputError(f"{where} holds a message without role or text: {message!r}")
            messages.append((role, text))
        if messages:
            return tuple(messages)
    raise InputError(f"{where} holds neither a text nor messages: {value!r:.80}")


_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "system": "system"}
