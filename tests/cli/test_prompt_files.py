"""Prompts from files as people have them."""

import json

import pytest

from vllm_dspark.cli.prompt_files import load_prompts
from vllm_dspark.errors import InputError


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "field", "content"),
    [
        ({"id": 1, "prompt": "Hi"}, "prompt", "Hi"),
        ({"question": "Q", "answer": "A"}, "question", "Q"),
        ({"turns": ["first", "second"]}, "turns", "first"),
        (
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": "A"},
                    {"role": "user", "content": "more"},
                ]
            },
            "messages",
            (("system", "S"), ("user", "U")),
        ),
        (
            {"conversation": [{"from": "human", "value": "H"}, {"from": "gpt", "value": "G"}]},
            "conversation",
            (("user", "H"),),
        ),
    ],
)
def test_known_fields(tmp_path, row, field, content):
    """Catches an answer taken for a prompt."""
    found = load_prompts(jsonl(tmp_path / "p.jsonl", row, row))
    assert found.field == field
    assert found.contents == (content, content)


def test_field_and_limit(tmp_path):
    """Catches a choice of prompts that differs from run to run."""
    path = jsonl(tmp_path / "p.jsonl", *({"prompt": "no", "x": str(i)} for i in range(50)))
    first = load_prompts(path, "x", 10, seed=1)
    assert first == load_prompts(path, "x", 10, seed=1)
    assert first != load_prompts(path, "x", 10, seed=2)
    assert len(set(first.contents)) == 10


def test_samples_need_no_file():
    """Catches a command that cannot be tried out."""
    assert len(load_prompts(None).contents) == 36


def test_dataset_folders(tmp_path):
    """Catches folders of either kind: saved by `datasets`, or with data files in them."""
    datasets = pytest.importorskip("datasets", reason="reads Hugging Face dataset folders")
    data = datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(5)])
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "dict")
    (tmp_path / "files").mkdir()
    data.to_parquet(tmp_path / "files" / "train.parquet")
    for name in ("saved", "dict", "files"):
        assert load_prompts(tmp_path / name).contents == tuple(f"p{i}" for i in range(5))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x"}], r"none of the fields \['body'\] .* --field"),
        ([{"prompt": "x"}], "holds 1 prompts; at least 2"),
        ([], "holds 0 prompts"),
        ([{"prompt": "x"}, {"text": "y"}], "row 2 has no field 'prompt'"),
        ([{"prompt": "x"}, {"prompt": 3}], "row 2, field 'prompt' holds neither"),
        ([{"messages": [{"content": "no role"}]}], "without role or text"),
        ([[1]], "line 1 is no JSON object"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    """Catches a traceback that does not say which row is meant."""
    with pytest.raises(InputError, match=message):
        load_prompts(jsonl(tmp_path / "p.jsonl", *rows))


def test_bad_files_are_named(tmp_path):
    """Catches binary files, broken JSON and empty folders."""
    broken = tmp_path / "p.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt"\n')
    with pytest.raises(InputError, match="line 2 is not JSON"):
        load_prompts(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="as text"):
        load_prompts(broken)
    (tmp_path / "empty").mkdir()
    # without the library the remedy is to install it
    with pytest.raises(InputError, match=r"holds no dataset|vllm-dspark\[datasets\]"):
        load_prompts(tmp_path / "empty")
