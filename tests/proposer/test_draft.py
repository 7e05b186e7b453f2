"""Block layouts of both formats, and buffers."""

import pytest
import torch

from vllm_dspark.proposer.draft import BlockLayout, DraftBuffers

ANCHOR, POSITION = torch.tensor([11, 12]), torch.tensor([100, 7])


def test_anchor_first():
    layout = BlockLayout(num_drafts=3, sample_from_anchor=True)
    assert layout.num_queries == 3
    assert layout.query_tokens(ANCHOR, 9).tolist() == [[11, 9, 9], [12, 9, 9]]
    assert layout.query_positions(POSITION).tolist() == [[100, 101, 102], [7, 8, 9]]
    assert layout.sampled_queries(2, "cpu").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bonus_anchor():
    layout = BlockLayout(num_drafts=3, sample_from_anchor=False)
    assert layout.num_queries == 4
    assert layout.query_tokens(ANCHOR, 9).tolist() == [[11, 9, 9, 9], [12, 9, 9, 9]]
    assert layout.query_positions(POSITION).tolist() == [[100, 101, 102, 103], [7, 8, 9, 10]]
    assert layout.sampled_queries(2, "cpu").tolist() == [[1, 2, 3], [5, 6, 7]]


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_drafts_follow_the_anchor(sample_from_anchor):
    layout = BlockLayout(3, sample_from_anchor)
    assert layout.draft_positions(POSITION).tolist() == [[101, 102, 103], [8, 9, 10]]


def test_buffers():
    buffers = DraftBuffers.allocate(4, 3, "cpu", with_confidence=True, cache_vocab=10)
    out = buffers.rows(2)
    assert out.tokens.shape == (2, 3) and out.confidence_logits.shape == (2, 3)
    assert out.tokens.data_ptr() == buffers.tokens.data_ptr()
    assert out.logits_cache.shape == (4, 3, 10) and (out.logits_cache == float("-inf")).all()
    assert out.logits_cache.dtype == torch.bfloat16
    greedy = DraftBuffers.allocate(4, 3, "cpu", with_confidence=False).rows(4)
    assert greedy.logits_cache is None and greedy.confidence_logits is None
