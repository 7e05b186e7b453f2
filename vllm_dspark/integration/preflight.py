"""Checks of target and drafter before vLLM builds anything, so that errors come early and plain."""

import logging
from pathlib import Path
from typing import Any

from vllm_dspark.proposer.checkpoint import CheckedDrafter, check_checkpoint
from vllm_dspark.proposer.spec import TargetShape, read_spec

logger = logging.getLogger("vllm.vllm_dspark")


def check_request(args: Any, target_model: Any) -> CheckedDrafter | None:
    """Raise DrafterError when the drafter named in the speculative config cannot serve this target.

    args: EngineArgs; fills in num_speculative_tokens (in a copy of the config) where the user gave
    none, since vLLM's default is one too many for drafters whose block starts with the bonus token.
    None for drafters that are not a local folder (hub ids are checked when they are loaded) and
    for drafters embedded in the target.
    """
    # vLLM takes both spellings of a key
    given = {k.replace("-", "_"): v for k, v in (args.speculative_config or {}).items()}
    model = given.get("model") or args.spec_model
    if model is None or not Path(model).is_dir():
        return None
    spec = read_spec(model)
    width = given.get("num_speculative_tokens") or args.spec_tokens
    if width is None:
        args.speculative_config = {**given, "num_speculative_tokens": spec.default_drafts}
    else:
        spec.check_width(int(width))
    text = target_model.hf_config.get_text_config().to_dict()
    checked = check_checkpoint(model, spec, TargetShape.from_config(text, "the target's config"))
    for finding in checked.findings:
        logger.warning("vllm-dspark: %s", finding.message)
    return checked
