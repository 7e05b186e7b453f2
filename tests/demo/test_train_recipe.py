"""The drafter's training recipe on a tiny random target: shapes, losses, resume, round trip."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from examples.train_drafter import evaluate as ev
from examples.train_drafter.config import (
    Bucket,
    DrafterConfig,
    GenerateConfig,
    TrainConfig,
)
from examples.train_drafter.data import BatchSampler
from examples.train_drafter.decode_attention import decode_attention_reference
from examples.train_drafter.export import (
    config_dict,
    drafter_config,
    export,
    load_checkpoint,
)
from examples.train_drafter.generate import Dataset, Request, generate
from examples.train_drafter.losses import combine, slot_losses
from examples.train_drafter.model import DSparkDrafter
from examples.train_drafter.prompts import (
    Prompt,
    PromptSet,
    change_numbers,
    derive,
    is_heldout,
)
from examples.train_drafter.target import FrozenTarget, TargetShape
from examples.train_drafter.train import Trainer, learning_rate_factor, override

SHAPE = TargetShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
)
DRAFTER = DrafterConfig(
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    num_layers=2,
    vocab_size=61,
    block_size=4,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    markov_rank=6,
    max_positions=128,
)
BUCKETS = (Bucket(24, 8, 8), Bucket(64, 4, 16))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.random(SHAPE, seed=3)


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 12, 30)
    tokens = rng.integers(3, SHAPE.vocab_size, lengths.sum()).astype(np.uint16)
    return PromptSet(
        tokens,
        np.cumsum([0, *lengths]),
        (np.arange(30) % 3).astype(np.uint8),
        np.asarray(["gsm8k", "derived"] * 15),
    )


@pytest.fixture(scope="module")
def data(target: FrozenTarget, prompts: PromptSet) -> Dataset:
    requests = [Request(i % 30, 0.7) for i in range(200)]
    return generate(target, prompts, requests, GenerateConfig(slots=32, max_new=24))


def small_trainer(target: FrozenTarget, data: Dataset, **changes: object) -> Trainer:
    config = dataclasses.replace(TrainConfig(), buckets=BUCKETS, lr=5e-3, **changes)
    return Trainer(target, data, DRAFTER, config)


def test_decoding_in_slots_equals_the_whole_forward(target, prompts):
    """Greedy text from refilled slots must be what the causal forward says, token for token.

    Catches slots that overwrite each other's cache or text, and off-by-one positions.
    """
    requests = [Request(i, 0.0) for i in range(30)]
    data = generate(target, prompts, requests, GenerateConfig(slots=7, max_new=20))
    assert len(data) == 30
    seen = set()
    for i in range(len(data)):
        row = data.tokens[data.offsets[i] : data.offsets[i + 1]].astype(np.int64)
        first = int(data.prompt_lengths[i])
        seen.add(row[:first].tobytes())
        hidden, _ = target.forward(torch.from_numpy(row)[None])
        best = target.logits(hidden)[0].argmax(-1).numpy()
        assert (row[first:] == best[first - 1 : -1]).all()
        ended = row[-1] == SHAPE.eos_token_id
        assert ended or len(row) == first + 20
        assert not (row[first:-1] == SHAPE.eos_token_id).any()
    assert seen == {prompts.row(i).astype(np.int64).tobytes() for i in range(30)}


def test_sampled_slots_follow_the_target_distribution(target, prompts):
    """T=1 first tokens against the softmax: every frequency of 2,000 draws within 5 sigma."""
    count = 2000
    config = GenerateConfig(slots=250, max_new=1)
    data = generate(target, prompts, [Request(0, 1.0)] * count, config)
    drawn = data.tokens[data.offsets[1:] - 1].astype(np.int64)
    row = torch.from_numpy(prompts.row(0).astype(np.int64))
    hidden, _ = target.forward(row[None])
    p = target.logits(hidden[0, -1]).softmax(-1).numpy()
    observed = np.bincount(drawn, minlength=SHAPE.vocab_size) / count
    sigma = np.sqrt(p * (1 - p) / count)
    assert np.all(np.abs(observed - p) < 5 * sigma + 1e-3)


def test_decode_attention_reads_only_the_used_part():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 8, generator=g)
    k, v = torch.randn(2, 2, 2, 10, 8, generator=g)
    out = decode_attention_reference(q, k, v, torch.tensor([3, 10]))
    k[0, :, 3:], v[0, :, 3:] = 99.0, 99.0
    again = decode_attention_reference(q, k, v, torch.tensor([3, 10]))
    torch.testing.assert_close(out, again)


def test_slot_losses_against_hand_computed_case():
    """p_d = (1/2, 1/4, 1/4), p_t = (1/4, 1/2, 1/4): TV = 1/4, -log p_d(1) = log 4."""
    draft = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3
    wanted = torch.tensor([[0.25, 0.5, 0.25]]).log() - 1
    ce, tv = slot_losses(draft, wanted, torch.tensor([1]))
    assert ce.item() == pytest.approx(math.log(4), rel=1e-6)
    assert tv.item() == pytest.approx(0.25, rel=1e-6)


def test_combine_weighs_positions_and_ignores_slots_past_the_end():
    config = dataclasses.replace(TrainConfig(), position_decay=1.0)
    ce, tv = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 1.0]])
    conf = torch.zeros(1, 2)
    both = combine(ce, tv, conf, torch.tensor([[True, True]]), config)
    w = math.exp(-1.0)
    assert both.cross_entropy.item() == pytest.approx((1 + 2 * w) / (1 + w), rel=1e-6)
    assert both.total_variation.item() == pytest.approx((0.5 + w) / (1 + w), rel=1e-6)
    assert both.confidence.item() == pytest.approx(math.log(2), rel=1e-6)
    assert both.expected_length.item() == pytest.approx(1.5)
    expected = 0.1 * both.cross_entropy + 0.9 * both.total_variation + both.confidence
    assert both.total.item() == pytest.approx(expected.item(), rel=1e-6)
    first = combine(ce, tv, conf, torch.tensor([[True, False]]), config)
    assert first.cross_entropy.item() == pytest.approx(1.0)
    assert first.acceptance.tolist() == [0.5, 0.0]


def test_confidence_label_has_no_gradient():
    """BCE must not pull the draft distribution towards what the head predicts."""
    tv = torch.full((1, 2), 0.3, requires_grad=True)
    config = dataclasses.replace(TrainConfig(), ce_weight=0.0, tv_weight=0.0)
    conf = torch.zeros(1, 2, requires_grad=True)
    valid = torch.ones(1, 2, dtype=torch.bool)
    combine(torch.zeros(1, 2), tv, conf, valid, config).total.backward()
    assert tv.grad is None or not tv.grad.any()
    assert conf.grad.abs().sum() > 0


def test_block_sees_context_before_its_anchor_and_itself_only(target):
    """Changing the anchor's own features, later ones or another block must change nothing."""
    torch.manual_seed(0)
    model = DSparkDrafter(DRAFTER)
    tokens = torch.randint(3, 61, (1, 20))
    features = torch.randn(1, 20, DRAFTER.feature_size)
    anchors = torch.tensor([[5, 12]])
    out = model(tokens, features, anchors, target.embed)
    changed = features.clone()
    changed[:, 5:] += 1.0
    other = tokens.clone()
    other[0, 12] = (other[0, 12] + 1) % 61
    again = model(other, changed, anchors, target.embed)
    torch.testing.assert_close(out[:, 0], again[:, 0])
    assert not torch.allclose(out[:, 1], again[:, 1])
    nearer = features.clone()
    nearer[:, 4] += 1.0
    assert not torch.allclose(out[:, 0], model(tokens, nearer, anchors, target.embed)[:, 0])
    # Both directions inside the block: the first slot feels where the last one is.
    shifted = DSparkDrafter(dataclasses.replace(DRAFTER, block_size=3))
    shifted.load_state_dict(model.state_dict())
    short = shifted(tokens, features, anchors, target.embed)
    assert not torch.allclose(out[:, 0, 0], short[:, 0, 0])


def test_sampler_covers_responses_and_nothing_else(data):
    sampler = BatchSampler(data, BUCKETS, torch.device("cpu"), seed=0)
    for _ in range(20):
        batch = sampler.next()
        before, labels, valid = batch.slots(4)
        assert valid.view(*batch.anchors.shape, 4)[..., 0].all()
        assert (batch.anchors < batch.ends[:, None] - 1).all()
        rows = torch.arange(len(batch.tokens))[:, None]
        expected = batch.tokens[rows, (before + 1).clamp_max(batch.tokens.shape[1] - 1)]
        assert (labels == expected)[valid].all()
    starts = dict(zip(map(int, data.offsets[:-1]), data.prompt_lengths, strict=True))
    assert len(starts) == len(data)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_reduces_the_loss(target, data, optimizer):
    trainer = small_trainer(target, data, optimizer=optimizer)
    held = BatchSampler(data, BUCKETS, torch.device("cpu"), seed=1)
    before = trainer.validate(held, 4)
    trainer.run(600, lambda step, _: step / 50)
    held = BatchSampler(data, BUCKETS, torch.device("cpu"), seed=1)
    after = trainer.validate(held, 4)
    assert after["total_variation"] < before["total_variation"] - 0.05
    assert after["confidence"] < before["confidence"]


def test_resumed_run_equals_an_uninterrupted_one(target, data, tmp_path):
    whole = small_trainer(target, data)
    whole.run(600, lambda step, _: step / 12)
    first = small_trainer(target, data)
    first.run(600, lambda step, _: 1.0 if step == 6 else step / 12)
    first.save(tmp_path / "state.pt")
    second = small_trainer(target, data, seed=first.config.seed)
    second.load(tmp_path / "state.pt")
    second.run(600, lambda step, _: step / 12)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_state_of_another_shape_is_refused(target, data, tmp_path):
    trainer = small_trainer(target, data)
    trainer.save(tmp_path / "state.pt")
    other = Trainer(target, data, dataclasses.replace(DRAFTER, num_layers=1), trainer.config)
    with pytest.raises(ValueError, match="another drafter shape"):
        other.load(tmp_path / "state.pt")


def test_export_round_trip(target, tmp_path):
    """Folding the feature scale must not change what the drafter computes."""
    torch.manual_seed(1)
    model = DSparkDrafter(DRAFTER)
    features = torch.randn(1, 20, DRAFTER.feature_size) * 5
    model.calibrate_features(features, torch.ones(1, 20, dtype=torch.bool))
    export(model, tmp_path, torch.float32)
    loaded = load_checkpoint(tmp_path)
    tokens, anchors = torch.randint(3, 61, (1, 20)), torch.tensor([[6, 9]])
    torch.testing.assert_close(
        model(tokens, features, anchors, target.embed),
        loaded(tokens, features, anchors, target.embed),
        rtol=1e-4,
        atol=1e-4,
    )
    assert drafter_config(config_dict(DRAFTER)) == DRAFTER


def test_default_drafter_fits_the_package_and_has_deepspec_names(tmp_path):
    model = DSparkDrafter(DrafterConfig())
    size = export(model, tmp_path)
    assert size <= 24_000_000
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        shapes = {k: tuple(f.get_slice(k).get_shape()) for k in f.keys()}  # noqa: SIM118
    assert shapes["fc.weight"] == (576, 5 * 576)
    assert shapes["markov_head.markov_w2.weight"] == (49152, 32)
    assert shapes["confidence_head.proj.weight"] == (1, 576 + 32)
    assert shapes["layers.2.self_attn.k_norm.weight"] == (64,)
    assert not any("embed_tokens" in k or "lm_head" in k or "scale" in k for k in shapes)


def test_learning_rate_and_overrides():
    config = TrainConfig()
    assert learning_rate_factor(0.0, config) == pytest.approx(0.01)
    assert learning_rate_factor(config.warmup, config) == 1.0
    assert learning_rate_factor(1.0, config) == pytest.approx(0.01)
    assert override(config, ["lr=0.5", "optimizer=adamw"]).lr == 0.5
    with pytest.raises(ValueError, match="plain setting"):
        override(config, ["buckets=3"])


def test_walk_follows_blocks():
    """Blocks at 0 (2 accepted), 3 (0), 4 (3 = all), 8; the text ends after place 8."""
    accepted = np.zeros((9, 3), bool)
    accepted[0, :2] = True
    accepted[4, :3] = True
    walk = ev.walk(ev.Judged(accepted, np.full((9, 3), 0.5), np.zeros((9, 3))))
    assert walk.emitted == [3, 1, 4, 1]
    assert walk.slots == [0, 1, 2, 0, 0, 1, 2, 0]
    assert walk.accepted == [True, True, False, False, True, True, True, False]


def test_area_under_curve():
    label = np.asarray([True, False, True, False])
    assert ev.area_under_curve(np.asarray([0.9, 0.1, 0.8, 0.2]), label) == 1.0
    assert ev.area_under_curve(np.asarray([0.5, 0.5, 0.5, 0.5]), label) == 0.5
    assert ev.area_under_curve(np.ones(2), np.ones(2, bool)) is None


def test_coupled_coins_equal_rejection_sampling():
    """The T=1 shortcut (coins along target text) against literal draft-accept-resample.

    i.i.d. target and draft over three tokens, K = 2, 40,000 blocks each way; the accepted lengths'
    distribution must agree within 5 sigma, and so must the first emitted token's.
    """
    p, q = np.asarray([0.6, 0.3, 0.1]), np.asarray([0.3, 0.3, 0.4])
    rng = np.random.default_rng(5)
    count = 40_000
    rest = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    literal, first = np.zeros(3), np.zeros(3)
    for _ in range(count):
        length = 0
        while length < 2:
            token = rng.choice(3, p=q)
            if rng.random() >= min(1.0, p[token] / q[token]):
                token = rng.choice(3, p=rest)
                break
            length += 1
            if length == 1:
                first[token] += 1
        if length == 0:
            first[token] += 1
        literal[length] += 1
    text = rng.choice(3, (count, 2), p=p)
    coins = rng.random((count, 2)) < np.minimum(1, q / p)[text]
    coupled = np.bincount(coins.cumprod(1).sum(1), minlength=3)
    sigma = np.sqrt(2 * count * 0.25)
    assert np.all(np.abs(literal - coupled) < 5 * sigma)
    assert np.all(np.abs(first - count * p) < 5 * sigma)


def test_judge_is_what_the_model_drafts(target, data):
    """judge() at T=0 against a literal block-by-block greedy loop."""
    torch.manual_seed(2)
    model = DSparkDrafter(DRAFTER).eval()
    tokens = torch.from_numpy(data.tokens[: data.offsets[1]].astype(np.int64))
    first = int(data.prompt_lengths[0])
    g = torch.Generator()
    judged = ev.judge(model, target, tokens, first, True, g)
    _, features = target.forward(tokens[None], collect=DRAFTER.target_layer_ids)
    for i, anchor in enumerate(range(first, len(tokens) - 1)):
        hidden = model(tokens[None], features, torch.tensor([[anchor]]), target.embed)[0, 0]
        previous, alive = tokens[anchor], True
        for k in range(DRAFTER.block_size):
            markov = model.markov_embed(previous[None], hidden.dtype)
            previous = model.logits(hidden[k : k + 1], markov, target.embed)[0].argmax()
            at = anchor + 1 + k
            alive = alive and at < len(tokens) and bool(previous == tokens[at])
            assert bool(judged.accepted[i, k]) == alive


def test_split_is_stable_and_derived_prompts_are_new():
    train = [
        Prompt(f"p-{i}", d, s, f"{i + 2} apples cost 30 dollars. How much are {i + 7}?")
        for i, (d, s) in enumerate(
            [("math", "gsm8k"), ("code", "mbpp"), ("code", "livecodebench"), ("chat", "mt-bench")]
        )
    ]
    assert [is_heldout(f"x-{i}") for i in range(60)].count(True) in range(1, 15)
    assert is_heldout("x-1") == is_heldout("x-1")
    made = derive(train, 60, seed=1)
    assert made == derive(train, 60, seed=1)
    texts = [p.text for p in made]
    assert len(set(texts)) == len(texts) == 60
    assert not set(texts) & {p.text for p in train}
    assert not any("{" in t and "}" in t and "{name}" in t for t in texts)


def test_change_numbers_keeps_words_and_small_numbers():
    text = "Tom has 20 apples and 1 pear, see $x_1$ and \\frac{3}{4}."
    out = change_numbers(text, random.Random(0))
    assert out.startswith("Tom has ") and " 1 pear" in out and "x_1" in out
