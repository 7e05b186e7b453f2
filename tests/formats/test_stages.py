"""The embedded DeepSeek-V4 drafter against a float64 reference, from stages to drafted tokens."""

import numpy as np
import pytest
import torch

from tests.formats import stages_reference as reference
from tests.formats.test_embedded import CONFIG, V41, tensors_of
from vllm_dspark.cpu.draft_ops import CpuDraftOps
from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import DraftBatch, DraftOutput, SamplingState
from vllm_dspark.kernels.reference import ReferenceDraftOps
from vllm_dspark.proposer.embedded import read_stages
from vllm_dspark.proposer.stages import Context, EmbeddedStages

torch.set_num_threads(1)

LENGTHS = (3, 8, 21)  # context tokens: below, at and beyond the window of 8
BLOCK = 5


class Case:
    """Random weights and inputs; every number of it is in float64."""

    def __init__(self, config=CONFIG):
        self.spec = read_stages(config)
        gen = torch.Generator().manual_seed(7)
        self.tensors = {
            name: self._scaled(name, tensor) for name, tensor in tensors_of(config, 1).items()
        }
        self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        h = self.spec.hidden_size
        self.aux = [
            torch.randn(n, len(self.spec.target_layer_ids) * h, generator=gen).double()
            for n in LENGTHS
        ]
        self.embeds = torch.randn(len(LENGTHS), BLOCK, h, generator=gen).double()
        self.lm_head = torch.randn(self.spec.vocab_size, h, generator=gen).double()
        self.anchor = torch.randint(0, self.spec.vocab_size, (len(LENGTHS),), generator=gen)
        self.positions = torch.tensor([[n + q for q in range(BLOCK)] for n in LENGTHS])

    @staticmethod
    def _scaled(name, tensor):
        """Activations of order one, so that no gate saturates and every term counts."""
        if "norm.weight" in name:
            return (1 + 0.2 * tensor).double()
        wide = tensor.shape[-1] ** -0.5 if tensor.dim() == 2 and "markov" not in name else 1.0
        return (tensor * wide).double()

    def context(self, stages):
        """Keys of the last `window` tokens, in slots of a row that also holds padding."""
        spec, size = self.spec, self.spec.window + 3
        keys = torch.full((spec.num_stages, len(LENGTHS), size, spec.head_dim), 1e3)
        keys = keys.to(stages.dtype)
        valid = torch.zeros(len(LENGTHS), size, dtype=torch.bool)
        for r, n in enumerate(LENGTHS):
            kept = min(n, spec.window)
            made = stages.context_keys(stages.main(self.aux[r]), torch.arange(n))
            keys[:, r, 1 : 1 + kept] = made[:, n - kept :]
            valid[r, 1 : 1 + kept] = True
        return Context(keys, valid)

    def expected_hidden(self):
        out = []
        for r, n in enumerate(LENGTHS):
            main = reference.main_states(self.arrays, self.spec, self.aux[r].numpy())
            out.append(
                reference.block_hidden(
                    self.arrays,
                    self.spec,
                    self.embeds[r].numpy(),
                    self.positions[r].tolist(),
                    main,
                    list(range(n)),
                )
            )
        return np.stack(out)


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)], ids=["f64", "f32"]
)
def test_hidden_states(case, dtype, tolerance):
    """Catches a wrong window, sink, rotation, stream mix or expert, in any of the stages."""
    stages = EmbeddedStages(case.spec, case.tensors, dtype)
    found = stages.hidden(case.embeds, case.positions, case.context(stages))
    np.testing.assert_allclose(
        found.double().numpy(), case.expected_hidden(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("ops", [ReferenceDraftOps(torch.float64), CpuDraftOps()])
def test_tokens_and_confidences(case, ops):
    """Catches heads that read other hidden states or embeddings than they were trained on."""
    dtype = torch.float64 if isinstance(ops, ReferenceDraftOps) else torch.float32
    stages = EmbeddedStages(case.spec, case.tensors, dtype)
    hidden = stages.hidden(case.embeds, case.positions, case.context(stages))
    rows = len(LENGTHS)
    out = DraftOutput(torch.zeros(rows, BLOCK, dtype=torch.int64), torch.zeros(rows, BLOCK))
    batch = DraftBatch(
        base_logits=stages.base_logits(hidden, case.lm_head).float(),
        hidden=hidden.float(),
        anchor=case.anchor,
        req_index=torch.arange(rows),
        position=case.positions + 1,
    )
    state = SamplingState(torch.zeros(rows), torch.zeros(rows, dtype=torch.int64))
    ops.sample_block(stages.head(), batch, state, out)
    expected = case.expected_hidden()
    for r in range(rows):
        tokens, confidences = reference.draft(
            case.arrays, case.spec, expected[r], case.lm_head.numpy(), int(case.anchor[r])
        )
        assert out.tokens[r].tolist() == tokens
        np.testing.assert_allclose(out.confidence_logits[r].numpy(), confidences, rtol=1e-3)


def test_padding_and_old_context_are_never_seen(case):
    """Catches keys outside the window that leak in: NaN there must not matter."""
    stages = EmbeddedStages(case.spec, case.tensors, torch.float64)
    context = case.context(stages)
    before = stages.hidden(case.embeds, case.positions, context)
    context.keys[:, ~context.valid] = 12345.0
    after = stages.hidden(case.embeds, case.positions, context)
    assert torch.equal(before, after)


def test_a_block_sees_its_later_queries(case):
    """Catches a causal mask inside the block: the last query's input must reach the first."""
    stages = EmbeddedStages(case.spec, case.tensors, torch.float64)
    context = case.context(stages)
    changed = case.embeds.clone()
    changed[:, -1] += 1.0
    before = stages.hidden(case.embeds, case.positions, context)[:, 0]
    after = stages.hidden(changed, case.positions, context)[:, 0]
    assert (before - after).abs().amin(-1).max() > 0


def test_one_request_at_a_time_gives_the_same(case):
    """Catches requests of a batch that mix, in attention or in the experts' rows."""
    stages = EmbeddedStages(case.spec, case.tensors, torch.float64)
    context = case.context(stages)
    together = stages.hidden(case.embeds, case.positions, context)
    for r in range(len(LENGTHS)):
        alone = stages.hidden(
            case.embeds[r : r + 1],
            case.positions[r : r + 1],
            Context(context.keys[:, r : r + 1], context.valid[r : r + 1]),
        )
        torch.testing.assert_close(alone[0], together[r], rtol=1e-10, atol=1e-10)


def test_v41_is_refused_with_a_reason():
    spec = read_stages(V41)
    with pytest.raises(DrafterError, match=r"V4\.1.*serve it on CUDA"):
        EmbeddedStages(spec, tensors_of(V41), torch.float32)


def test_stages_agree_with_transformers(case):
    """Catches a misreading that the reference shares: transformers has the target's layers.

    Without a mask its attention sees every token it is given, and so a block without context is
    the one thing that both compute.
    """
    layer_module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    spec, weights = case.spec, {n: t.float() for n, t in case.tensors.items()}
    config = DeepseekV4Config(
        hidden_size=spec.hidden_size, num_attention_heads=spec.num_heads, head_dim=spec.head_dim,
        q_lora_rank=spec.q_rank, o_lora_rank=spec.o_rank, o_groups=spec.o_groups,
        moe_intermediate_size=spec.expert_width, n_routed_experts=spec.num_experts,
        num_experts_per_tok=spec.active_experts, routed_scaling_factor=spec.routed_scale,
        swiglu_limit=spec.swiglu_limit, hc_mult=spec.streams, hc_eps=spec.stream_eps,
        hc_sinkhorn_iters=spec.sinkhorn_rounds, rms_norm_eps=spec.norm_eps, num_hidden_layers=1,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"], vocab_size=spec.vocab_size,
        sliding_window=spec.window, attn_implementation="eager",
    )  # fmt: skip
    streams = case.embeds.float().unsqueeze(-2).repeat(1, 1, spec.streams, 1)
    steps = torch.arange(0, spec.rope_dim, 2).double()
    angle = case.positions.double().unsqueeze(-1) * spec.rope_theta ** (-steps / spec.rope_dim)
    places = {"main": (angle.cos().float(), angle.sin().float())}
    for stage in range(spec.num_stages):
        layer = layer_module.DeepseekV4DecoderLayer(config, 0).eval()
        layer.load_state_dict(_transformers_names(weights, f"mtp.{stage}.", spec))
        with torch.no_grad():
            streams = layer(
                streams,
                position_embeddings=places,
                position_ids=case.positions,
                attention_mask=None,
            )
    head = layer_module.DeepseekV4HyperHead(config)
    last = f"mtp.{spec.num_stages - 1}.hc_head_"
    head.load_state_dict({f"hc_{n}": weights[last + n] for n in ("fn", "base", "scale")})
    expected = head(streams).detach()

    stages = EmbeddedStages(spec, case.tensors, torch.float32)
    rows = len(LENGTHS)
    empty = Context(
        torch.zeros(spec.num_stages, rows, 0, spec.head_dim), torch.zeros(rows, 0, dtype=torch.bool)
    )
    found = stages.hidden(case.embeds, case.positions, empty)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def _transformers_names(weights, prefix, spec):
    """A stage's tensors under the names of transformers' decoder layer."""
    names = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.q_a_proj.weight": "attn.wq_a.weight",
        "self_attn.q_a_norm.weight": "attn.q_norm.weight",
        "self_attn.q_b_proj.weight": "attn.wq_b.weight",
        "self_attn.kv_proj.weight": "attn.wkv.weight",
        "self_attn.kv_norm.weight": "attn.kv_norm.weight",
        "self_attn.o_a_proj.weight": "attn.wo_a.weight",
        "self_attn.o_b_proj.weight": "attn.wo_b.weight",
        "self_attn.sinks": "attn.attn_sink",
        "mlp.gate.weight": "ffn.gate.weight",
        "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
        "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
        "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    }
    for part in ("attn", "ffn"):
        names |= {f"{part}_hc.{n}": f"hc_{part}_{n}" for n in ("fn", "base", "scale")}
    state = {theirs: weights[prefix + ours] for theirs, ours in names.items()}
    experts = [f"{prefix}ffn.experts.{e}." for e in range(spec.num_experts)]
    state["mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat([weights[f"{e}w1.weight"], weights[f"{e}w3.weight"]]) for e in experts]
    )
    state["mlp.experts.down_proj"] = torch.stack([weights[f"{e}w2.weight"] for e in experts])
    return state
