"""Prompts: the public ones, split by a hash rule, and many more derived from the training part.

    python -m examples.train_drafter.prompts --prompts FILE.jsonl --target FOLDER --out DIR

writes `train.npz` and `heldout.npz` (token ids through the chat template, no text). A prompt is
held out when sha256("vllm-dspark-heldout:" + id) is 0 modulo 10, whatever else the file contains;
nothing derived ever looks at a held-out prompt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.train_drafter import wordlists
from examples.train_drafter.config import GenerateConfig

DOMAINS = ("math", "code", "chat")
HELDOUT_SALT = "vllm-dspark-heldout:"
# Share of derived prompts by domain; chat is the least predictable, so it gets the most.
DERIVED_SHARE = {"math": 0.3, "code": 0.3, "chat": 0.4}
_NUMBER = re.compile(r"(?<![\w.\\{])\d{1,4}(?![\w.}])")
MATH_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """One user message; `source` is a benchmark name or "derived"."""

    id: str
    domain: str
    source: str
    text: str


@dataclass
class PromptSet:
    """Tokenised prompts: `tokens[offsets[i]:offsets[i+1]]` is prompt i, with chat template."""

    tokens: np.ndarray  # uint16 [total]
    offsets: np.ndarray  # int64 [n + 1]
    domains: np.ndarray  # uint8 [n], index into DOMAINS
    sources: np.ndarray  # str [n]

    def __len__(self) -> int:
        return len(self.domains)

    def row(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **self.__dict__)

    @classmethod
    def load(cls, path: Path) -> PromptSet:
        with np.load(path) as data:
            return cls(**{name: data[name] for name in data.files})


def is_heldout(prompt_id: str) -> bool:
    """The split rule: stable, per prompt, independent of the rest of the file."""
    digest = hashlib.sha256((HELDOUT_SALT + prompt_id).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def read_public(path: Path) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held-out) prompts of a jsonl file with id, domain, source, prompt."""
    train, heldout = [], []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = Prompt(row["id"], row["domain"], row["source"], row["prompt"])
        (heldout if is_heldout(prompt.id) else train).append(prompt)
    return train, heldout


def change_numbers(text: str, rng: random.Random) -> str:
    """Replace the integers of a problem by others of similar size: new text, same style."""

    def another(match: re.Match[str]) -> str:
        value = int(match.group())
        if value <= 1:
            return match.group()
        low, high = max(2, value // 2), max(3, value + value // 2 + 2)
        step = 10 if value % 10 == 0 and value >= 20 else 1
        return str(max(2, rng.randint(low, high) // step * step))

    return _NUMBER.sub(another, text)


def _first_sentences(text: str, rng: random.Random) -> str:
    parts = re.split(r"(?<=[.!?\u3002\uff1f\uff01])\s+", text.strip())
    return " ".join(parts[: rng.randint(1, max(1, min(3, len(parts))))])[:600]


def _derive_math(base: list[Prompt], rng: random.Random) -> str:
    if rng.random() < 0.75:
        return change_numbers(rng.choice(base).text, rng)
    return wordlists.fill(rng.choice(wordlists.MATH), rng) + MATH_SUFFIX


def _derive_code(base: list[Prompt], rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.45:  # contest problems are long: fewer of them, the rest short
        long = [p for p in base if p.source == "livecodebench"] or base
        return change_numbers(rng.choice(long).text, rng)
    if kind < 0.6:
        short = [p for p in base if p.source != "livecodebench"] or base
        return change_numbers(rng.choice(short).text, rng)
    return wordlists.fill(rng.choice(wordlists.CODE), rng)


def _derive_chat(base: list[Prompt], rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return change_numbers(_first_sentences(rng.choice(base).text, rng), rng)
    if kind < 0.4:
        request = wordlists.fill(rng.choice(wordlists.REWRITE), rng)
        return f"{request}\n\n{_first_sentences(rng.choice(base).text, rng)}"
    return wordlists.fill(rng.choice(wordlists.CHAT), rng)


def derive(train: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` new prompts, deterministic in `seed`, without duplicates."""
    rng = random.Random(seed)
    makers = {"math": _derive_math, "code": _derive_code, "chat": _derive_chat}
    made: list[Prompt] = []
    seen = {prompt.text for prompt in train}
    for domain, share in DERIVED_SHARE.items():
        base = [p for p in train if p.domain == domain]
        wanted, tries = round(count * share), 0
        while wanted and tries < 50 * count + 100:
            tries += 1
            text = makers[domain](base, rng)
            if text in seen:
                continue
            seen.add(text)
            made.append(Prompt(f"derived-{domain}-{wanted}", domain, "derived", text))
            wanted -= 1
    return made


def tokenise(prompts: list[Prompt], tokenizer: object, max_prompt: int) -> PromptSet:
    """Apply the chat template; prompts longer than `max_prompt` tokens are dropped."""
    rows, domains, sources = [], [], []
    for start in range(0, len(prompts), 1000):
        chunk = prompts[start : start + 1000]
        texts = [
            tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                [{"role": "user", "content": p.text}], add_generation_prompt=True, tokenize=False
            )
            for p in chunk
        ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        for prompt, row in zip(chunk, ids, strict=True):
            if len(row) <= max_prompt:
                rows.append(np.asarray(row, dtype=np.uint16))
                domains.append(DOMAINS.index(prompt.domain))
                sources.append(prompt.source)
    offsets = np.cumsum([0] + [len(r) for r in rows]).astype(np.int64)
    return PromptSet(
        np.concatenate(rows), offsets, np.asarray(domains, np.uint8), np.asarray(sources)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--derived", type=int, default=GenerateConfig.derived_prompts)
    parser.add_argument("--seed", type=int, default=GenerateConfig.seed)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    train, heldout = read_public(args.prompts)
    print("train", Counter(p.source for p in train), "heldout", Counter(p.source for p in heldout))
    train += derive(train, args.derived, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("train", train), ("heldout", heldout)):
        made = tokenise(prompts, tokenizer, GenerateConfig.max_prompt)
        made.save(args.out / f"{name}.npz")
        print(f"{name}: {len(made)} prompts, {len(made.tokens)} tokens, {len(prompts)} before")


if __name__ == "__main__":
    main()
