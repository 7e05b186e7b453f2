"""A worker whose confidences differ from other ranks' in their last bits, and that remembers."""

import torch

from vllm_dspark.integration.cpu_worker import DSparkCPUWorker


class PerturbedWorker(DSparkCPUWorker):
    """DSparkCPUWorker; on rank > 0 every confidence logit is one float32 step higher."""

    def load_model(self, *args: object, **kwargs: object) -> None:
        super().load_model(*args, **kwargs)
        ops = self.model_runner.speculator.ops
        sample_block, rank = ops.sample_block, self.rank

        def sampled(head: object, batch: object, state: object, out: object) -> None:
            sample_block(head, batch, state, out)
            if rank > 0:
                logits = out.confidence_logits
                logits.copy_(torch.nextafter(logits, torch.full_like(logits, float("inf"))))

        ops.sample_block = sampled

    def initialize_from_config(self, *args: object, **kwargs: object) -> object:
        result = super().initialize_from_config(*args, **kwargs)
        self.seen: list[dict[str, int]] = []
        windows = self.model_runner._windows
        if windows is not None:
            allocate = windows._allocate

            def remembered(num_drafts: object) -> object:
                admitted = allocate(num_drafts)
                self.seen.append(windows.admitted()().by_name())
                return admitted

            windows._allocate = remembered
        return result

    def windows_seen(self) -> list[dict[str, int]]:
        """Windows of all trimmed steps so far."""
        return self.seen
