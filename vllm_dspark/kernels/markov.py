"""The drafter's sequential head, fused: one pass over W2 and the base logits per drafted column.

For column k (notation of ``reference.py``): every program owns a slice of the draft vocabulary and
a block of requests, forms scale * (softcap(base_k) + W2 y_k) tile by tile, stores the row the
rejection test will divide by, adds Gumbel noise and keeps a running (maximum, lowest id). Partial
maxima [2, R, parts] are reduced by whoever needs the token next:
    vanilla head, few rows   the next column's programs themselves (K + 1 launches in all)
    otherwise                a small kernel that also evaluates the gated or rnn latent y_k (2K + 1)
The last launch writes the last token and the confidences of all columns.

Bytes per column: W2 (V_d r), base logits (R V_d), cached logits (R V_d, sampled rows only). Odd
columns walk the vocabulary backwards, so what column k left in L2 is what column k + 1 reads first.
The hidden-state part of the gated and rnn projections does not depend on tokens and is one matrix
product for the whole block.
"""

import torch
import triton

from vllm_dspark.kernels.launch import DraftLaunch, describe_device, draft_launch
from vllm_dspark.kernels.markov_kernels import (
    finish_block_kernel,
    latent_kernel,
    sample_column_kernel,
)
from vllm_dspark.kernels.protocols import DraftBatch, DraftHead, DraftOutput, SamplingState

# Rows up to which every program of a vanilla head reduces the partial maxima by itself: the reads
# (rows x parts x 8 bytes per program, from L2) then cost less than another launch.
_FUSED_REDUCE_ROWS = 16
_LATENT_ROWS = 16
_KINDS = {"vanilla": 0, "gated": 1, "rnn": 2}


class TritonDraftOps:
    """`DraftOps` for one loaded head; buffers are made once, for up to `max_reqs` requests.

    Blocks have up to `num_columns` columns.
    """

    def __init__(
        self,
        head: DraftHead,
        max_reqs: int,
        num_columns: int,
        vocab: int,
        device: torch.device,
        launch: DraftLaunch | None = None,  # overrides the table (benchmark sweeps)
    ) -> None:
        self.head = head
        self._override = launch
        self.device = describe_device(device)
        self.max_reqs, self.num_columns, self.vocab = max_reqs, num_columns, vocab
        parts = max(
            self._launch(n).num_parts(n, vocab, self.device) * n for n in range(1, max_reqs + 1)
        )
        self._value = torch.empty(2 * parts, dtype=torch.float32, device=device)
        self._index = torch.empty(2 * parts, dtype=torch.int32, device=device)
        self._latent = self._value  # placeholders of the dtype the kernels do not read
        self._state = self._value
        self._projected = self._value
        markov = head.markov
        if markov is None:
            return
        if not (markov.w1.is_contiguous() and markov.w2.is_contiguous()):
            raise ValueError("the fused drafting head needs contiguous W1 and W2")
        rank = markov.rank
        self._latent = torch.empty(max_reqs, rank, dtype=markov.w2.dtype, device=device)
        if markov.kind != "vanilla":
            assert markov.proj_weight is not None, f"{markov.kind} head without its projection"
            self._projected = torch.empty(
                max_reqs * num_columns,
                markov.proj_weight.shape[0],
                dtype=markov.proj_weight.dtype,
                device=device,
            )
        if markov.kind == "rnn":
            self._state = torch.empty(2 * max_reqs * rank, dtype=torch.float32, device=device)

    def _launch(self, num_reqs: int) -> DraftLaunch:
        if self._override is not None:
            return self._override
        markov = self.head.markov
        rank = 16 if markov is None else markov.rank
        size = 2 if markov is None else markov.w2.element_size()
        return draft_launch(self.device.arch, num_reqs, rank, size)

    def sample_block(
        self, head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
    ) -> None:
        """Writes the block's tokens, confidences and cached logits into `out`."""
        if head is not self.head:
            raise ValueError("TritonDraftOps was built for another head; make one per loaded head")
        num_reqs, num_columns, vocab = batch.base_logits.shape
        if num_reqs > self.max_reqs or num_columns > self.num_columns or vocab != self.vocab:
            raise ValueError(
                f"base_logits {tuple(batch.base_logits.shape)} does not fit buffers made for "
                f"[{self.max_reqs}, {self.num_columns}, {self.vocab}]"
            )
        if batch.base_logits.stride(2) != 1 or batch.hidden.stride(2) != 1:
            raise ValueError("base_logits and hidden must have contiguous rows")
        launch = self._launch(num_reqs)
        num_parts = launch.num_parts(num_reqs, vocab, self.device)
        markov = head.markov
        gather = markov is not None and markov.kind == "vanilla" and num_reqs <= _FUSED_REDUCE_ROWS
        if markov is not None and markov.kind != "vanilla":
            self._project_hidden(batch)
        for column in range(num_columns):
            if not gather:
                self._write_latent(batch, out, column, num_parts)
            self._sample_column(batch, state, out, column, launch, num_parts, gather)
        self._finish(batch, out, num_parts)

    def _project_hidden(self, batch: DraftBatch) -> None:
        markov = self.head.markov
        assert markov is not None and markov.proj_weight is not None, "projection of a latent head"
        width = batch.hidden.shape[-1]
        weight = markov.proj_weight
        weight = weight[:, :width] if markov.kind == "gated" else weight[:, -width:]
        hidden = batch.hidden.reshape(-1, width).to(weight.dtype)
        projected = self._projected[: hidden.shape[0]]
        if markov.proj_bias is None:
            torch.mm(hidden, weight.T, out=projected)
        else:
            torch.addmm(markov.proj_bias.to(weight.dtype), hidden, weight.T, out=projected)

    def _write_latent(
        self, batch: DraftBatch, out: DraftOutput, column: int, num_parts: int
    ) -> None:
        markov, head = self.head.markov, self.head
        num_reqs = batch.anchor.shape[0]
        rank = 0 if markov is None else markov.rank
        proj = self._value
        if markov is not None and markov.kind != "vanilla":
            assert markov.proj_weight is not None, "checked when the buffers were made"
            width = batch.hidden.shape[-1]
            proj = markov.proj_weight[:, width:] if markov.kind == "gated" else markov.proj_weight
        width = max(triton.next_power_of_2(rank), 16)
        block_o = min(width, 512 if markov is None or markov.kind == "vanilla" else 32)
        grid = (triton.cdiv(num_reqs, _LATENT_ROWS), max(triton.cdiv(rank, block_o), 1))
        latent_kernel[grid](
            self._latent,
            self._state,
            out.tokens,
            self._value,
            self._index,
            batch.anchor,
            batch.req_index,
            batch.anchor if head.d2t is None else head.d2t,
            self._value if markov is None else markov.w1,
            proj,
            self._projected,
            num_reqs,
            column,
            proj.stride(0),
            out.tokens.stride(0),
            batch.req_index.stride(0),
            FIRST=column == 0,
            NUM_COLUMNS=batch.base_logits.shape[1],
            KIND=0 if markov is None else _KINDS[markov.kind],
            RANK=rank,
            BLOCK_K=min(width, 64),
            BLOCK_R=_LATENT_ROWS,
            BLOCK_O=block_o,
            NUM_PARTS=num_parts,
            BLOCK_P=triton.next_power_of_2(num_parts),
            HAS_D2T=head.d2t is not None,
            num_warps=4,
        )

    def _sample_column(
        self,
        batch: DraftBatch,
        state: SamplingState,
        out: DraftOutput,
        column: int,
        launch: DraftLaunch,
        num_parts: int,
        gather: bool,
    ) -> None:
        head, markov, cache = self.head, self.head.markov, out.logits_cache
        num_reqs, _, vocab = batch.base_logits.shape
        rank = 0 if markov is None else markov.rank
        latent = markov.w1 if gather and markov is not None else self._latent
        sample_column_kernel[(triton.cdiv(num_reqs, launch.block_rows), num_parts)](
            self._value,
            self._index,
            out.tokens,
            batch.base_logits if cache is None else cache,
            batch.base_logits,
            latent,
            batch.base_logits if markov is None else markov.w2,
            batch.anchor if head.d2t is None else head.d2t,
            batch.anchor,
            batch.req_index,
            batch.position,
            state.temperature,
            state.seeds,
            num_reqs,
            vocab,
            column,
            0 if cache is None else cache.stride(0),
            0 if cache is None else cache.stride(1),
            batch.base_logits.stride(0),
            batch.base_logits.stride(1),
            latent.stride(0),
            batch.position.stride(0),
            out.tokens.stride(0),
            batch.req_index.stride(0),
            FIRST=column == 0,
            BACKWARDS=column % 2 == 1,
            RANK=rank,
            BLOCK_K=max(triton.next_power_of_2(rank), 16),
            BLOCK_R=launch.block_rows,
            BLOCK_V=launch.block_v,
            STAGES=launch.num_stages,
            NUM_PARTS=num_parts,
            BLOCK_P=triton.next_power_of_2(num_parts),
            GATHER=gather,
            SAMPLE=cache is not None,
            HAS_D2T=head.d2t is not None,
            SOFT_CAP=head.soft_cap or 0.0,
            SCALE=head.logit_scale,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )

    def _finish(self, batch: DraftBatch, out: DraftOutput, num_parts: int) -> None:
        head, confidence = self.head, self.head.confidence
        num_reqs, num_columns = batch.base_logits.shape[:2]
        wanted = confidence is not None and out.confidence_logits is not None
        logits = out.confidence_logits if wanted else self._value
        with_markov = confidence is not None and confidence.with_markov and head.markov is not None
        rank = head.markov.rank if with_markov and head.markov is not None else 0
        weight = confidence.weight if confidence is not None else self._value
        bias = confidence.bias if confidence is not None else None
        assert logits is not None, "a confidence buffer exists where one is wanted"
        finish_block_kernel[(num_reqs, num_columns)](
            out.tokens,
            logits,
            self._value,
            self._index,
            batch.anchor,
            batch.req_index,
            batch.anchor if head.d2t is None else head.d2t,
            batch.hidden,
            weight,
            weight if bias is None else bias,
            self._value if head.markov is None else head.markov.w1,
            num_reqs,
            out.tokens.stride(0),
            batch.req_index.stride(0),
            logits.stride(0),
            batch.hidden.stride(0),
            batch.hidden.stride(1),
            HIDDEN=batch.hidden.shape[-1],
            RANK=rank,
            BLOCK_H=1024,
            BLOCK_K=max(triton.next_power_of_2(rank), 16),
            NUM_COLUMNS=num_columns,
            NUM_PARTS=num_parts,
            BLOCK_P=triton.next_power_of_2(num_parts),
            HAS_D2T=head.d2t is not None,
            HAS_CONFIDENCE=wanted,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )
