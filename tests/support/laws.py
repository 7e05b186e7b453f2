"""Exact next-token laws of the tiny targets, from transformers in float64."""

from pathlib import Path

import numpy as np
import torch


class TargetLaw:
    """Laws of a target under given sampling parameters."""

    def __init__(
        self, target: Path, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> None:
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(target, attn_implementation="eager")
        self._model = model.double().eval()
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def after_each(self, contexts: np.ndarray) -> np.ndarray:
        """Laws [B, L, V] of the token after each position of contexts [B, L]."""
        with torch.inference_mode():
            logits = self._model(torch.as_tensor(contexts)).logits
        return self.of_logits(logits).numpy()

    def of_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Temperature, then top-k, then top-p: the order in which vLLM applies them."""
        logits = logits.double() / self._temperature
        if self._top_k:
            least = logits.topk(self._top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        law = logits.softmax(dim=-1)
        if self._top_p < 1.0:  # the fewest likeliest tokens that reach top_p together
            falling, order = law.sort(dim=-1, descending=True)
            drop = falling.cumsum(dim=-1) - falling >= self._top_p
            law = law.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), 0.0)
            law = law / law.sum(dim=-1, keepdim=True)
        return law

    def joint(self, prompt: list[int], length: int) -> np.ndarray:
        """P(x_1..x_length | prompt), an array with one axis of V for each token."""
        vocab = self._model.config.vocab_size
        joint = np.ones(())
        for n in range(length):
            tails = np.indices((vocab,) * n).reshape(n, -1).T if n else np.zeros((1, 0), int)
            contexts = np.concatenate([np.tile(prompt, (len(tails), 1)), tails], axis=1)
            law = self.after_each(contexts)[:, -1]
            joint = joint.reshape(-1, 1) * law
        return joint.reshape((vocab,) * length)


def markov_draft_scores(drafter: Path, previous: np.ndarray) -> np.ndarray:
    """Draft logits [N, V] of a markov pair's drafter after tokens `previous` [N].

    The backbone of such a drafter is (nearly) silent, so its Markov head is its whole law. Used
    to order tokens, for which any function of the past will do.
    """
    from safetensors.torch import load_file

    weights = load_file(drafter / "model.safetensors")
    w1 = weights["markov_head.markov_w1.weight"].double()
    w2 = weights["markov_head.markov_w2.weight"].double()
    return (w1[torch.as_tensor(previous)] @ w2.T).numpy()
