"""What a request's parameters say about how it may be scheduled and learned from."""

from typing import Any

from vllm_dspark.planning.plan import owner_id

# A temperature below this is greedy for vLLM (vllm.sampling_params._SAMPLING_EPS).
_GREEDY_BELOW = 1e-5


def tenant_of(request: Any) -> int | None:
    """Whose influence on shared learning a request counts towards; None: its own.

    vLLM knows no users. A cache salt, which separates users by design, or an adapter names one;
    the request ids of one client have nothing in common that it could not make up.
    """
    if request.cache_salt:
        return owner_id(f"salt:{request.cache_salt}")
    if request.lora_request is not None:
        return owner_id(f"lora:{request.lora_request.lora_name}")
    return None


def is_sampled(request: Any) -> bool:
    """Whether the request has a temperature."""
    params = request.sampling_params
    return params is not None and params.temperature >= _GREEDY_BELOW


def is_untouched(request: Any) -> bool:
    """Whether nothing but temperature and truncation alters the request's target distribution.

    Only such requests may teach the calibration: others accept what their rules let through.
    """
    params = request.sampling_params
    if params is None or request.use_structured_output:
        return False
    neutral = (
        params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )
    rules = (
        params.bad_words,
        params.logit_bias,
        params.allowed_token_ids,
        params.min_tokens,
        params.extra_args,
    )
    return neutral and not any(rules)
