"""Ragged rejection: verification of windows of 1..K+1 rows, greedy and sampled, standard and block.

The rules are those of ``reference.py``. Launches (S parts share a row's vocabulary):
    row_stats     [R, K+1, S]  maximum and sum of each target row and of each cached draft row over
                               its temperature; maximum and argmax where the request is greedy
    block_ratios  [R]          block only: row statistics and the joint ratios of all columns
    block_mass    [R, K+1, S]  block only: sum(max(ratio_i p_i - q_i, 0))
    resample      [R, S]       the accepted prefix (each part judges for itself), then
                               argmax(log w + Gumbel) over the row after it, w from the residual,
                               or from p where that is empty; the last part writes the outcome
Every row is read once, and one more row per request to resample; block reads each pair of rows once
more. Windows may come in any chunks: a request's result depends on its own rows, seed and positions
only.

Probabilities are float32 relative to the row's maximum (the reference: float64), so an acceptance
test can differ from the reference where u q and p agree to about 1e-6, and nowhere else.
"""

from typing import Any

import torch
import triton

from vllm_dspark.kernels.dependent import dependent_launches
from vllm_dspark.kernels.launch import describe_device, rejection_parts
from vllm_dspark.kernels.protocols import RejectBatch, RejectOutcome, RejectRule, SamplingState
from vllm_dspark.kernels.rejection_block import block_mass_kernel, block_ratios_kernel
from vllm_dspark.kernels.rejection_kernels import resample_kernel, row_stats_kernel

_GROUPS, _LANES = 2, 1024  # tile of the statistics: 16 logits per thread of four warps
_BLOCK_V = 1024
_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonRejectOps:
    """`RejectOps` with scratch for up to `max_reqs` requests.

    Tokens and their numbers are tensors of their own; the rest is valid until the next call.
    """

    def __init__(self, max_reqs: int, num_drafts: int, vocab: int, device: torch.device) -> None:
        self.max_reqs, self.num_drafts, self.vocab = max_reqs, num_drafts, vocab
        self.device = describe_device(device)
        self._dependent = dependent_launches(device)
        columns = num_drafts + 1
        parts = max(
            n * rejection_parts(self.device, n, columns, vocab) for n in range(1, max_reqs + 1)
        )

        def floats(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        def ints(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._stats, self._argmax = floats(4 * parts * columns), ints(parts * columns)
        self._rows, self._mass = floats(5 * max_reqs * columns), floats(parts * columns)
        self._length, self._done = ints(max_reqs), ints(max_reqs)
        self._value, self._index = floats(2 * parts), ints(2 * parts)
        self._accepted, self._verified = ints(max_reqs), ints(max_reqs)

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        """Accepts a prefix of each window and draws the token after it."""
        num_reqs = batch.cu_num_logits.shape[0] - 1
        self._check(batch, rule, num_reqs)
        columns, vocab = rule.num_drafts + 1, batch.target_logits.shape[1]
        num_parts = rejection_parts(self.device, num_reqs, columns, vocab)
        has_draft = batch.draft_logits is not None
        draft = batch.target_logits if batch.draft_logits is None else batch.draft_logits
        # Arguments by name, as several kernels take them.
        rows: dict[str, Any] = {
            "target_ptr": batch.target_logits,
            "draft_ptr": draft,
            "cu_ptr": batch.cu_num_logits,
            "mapping_ptr": batch.idx_mapping,
            "temperature_ptr": state.temperature,
            "vocab": vocab,
            "draft_vocab": draft.shape[-1],
            "stride_target": batch.target_logits.stride(0),
            "stride_dm": draft.stride(0) if has_draft else 0,
            "stride_dk": draft.stride(1) if has_draft else 0,
            "HAS_DRAFT": has_draft,
            "DEPENDENT": self._dependent,
        }
        sizes: dict[str, Any] = {
            "NUM_DRAFTS": rule.num_drafts,
            "NUM_PARTS": num_parts,
            "BLOCK_J": triton.next_power_of_2(columns),
            "BLOCK_S": triton.next_power_of_2(num_parts),
        }
        row_stats_kernel[(num_reqs, columns, num_parts)](
            stats_ptr=self._stats,
            argmax_ptr=self._argmax,
            done_ptr=self._done,
            **rows,
            GROUPS=_GROUPS,
            LANES=_LANES,
            num_warps=4,
        )
        rows["tokens_ptr"] = batch.draft_tokens
        block = {"rows_ptr": self._rows, "length_ptr": self._length}
        if rule.method == "block":
            block_ratios_kernel[(num_reqs,)](
                **block,
                stats_ptr=self._stats,
                **rows,
                **sizes,
                num_warps=1,
                launch_pdl=self._dependent,
            )
            block_mass_kernel[(num_reqs, columns, num_parts)](
                mass_ptr=self._mass,
                **block,
                **rows,
                BLOCK_V=2 * _BLOCK_V,
                num_warps=4,
                launch_pdl=self._dependent,
            )
        # The engine reads these later, on its copy stream, when the next step is under way.
        num_sampled = self._accepted.new_empty(num_reqs)
        sampled = num_sampled.new_empty((num_reqs, columns), dtype=torch.int64)
        resample_kernel[(num_reqs, num_parts)](
            sampled_ptr=sampled,
            num_sampled_ptr=num_sampled,
            accepted_ptr=self._accepted,
            verified_ptr=self._verified,
            value_ptr=self._value,
            index_ptr=self._index,
            done_ptr=self._done,
            stats_ptr=self._stats,
            argmax_ptr=self._argmax,
            **block,
            mass_ptr=self._mass,
            **rows,
            pos_ptr=batch.pos,
            seeds_ptr=state.seeds,
            rates_ptr=state.temperature if rule.synthetic_rates is None else rule.synthetic_rates,
            **sizes,
            SYNTHETIC=rule.synthetic_rates is not None,
            BLOCK_METHOD=rule.method == "block",
            BLOCK_V=_BLOCK_V,
            num_warps=4,
            launch_pdl=self._dependent,
        )
        return RejectOutcome(
            sampled, num_sampled, self._accepted[:num_reqs], self._verified[:num_reqs]
        )

    def _check(self, batch: RejectBatch, rule: RejectRule, num_reqs: int) -> None:
        if num_reqs > self.max_reqs or rule.num_drafts != self.num_drafts:
            raise ValueError(
                f"{num_reqs} requests of {rule.num_drafts} drafts do not fit buffers made for "
                f"{self.max_reqs} of {self.num_drafts}"
            )
        logits = batch.target_logits
        if logits.dtype not in _LOGIT_DTYPES or logits.stride(1) != 1:
            raise ValueError(
                f"target_logits must be float32, bfloat16 or float16 with contiguous rows, got "
                f"{logits.dtype} with strides {logits.stride()}"
            )
