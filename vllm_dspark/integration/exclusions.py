"""Requests that scheduling must not touch: a step that holds one runs native as a whole.

Recognised when a request enters the batch, so the plan says native before anything is executed.

| what                                       | why                                                 |
|--------------------------------------------|-----------------------------------------------------|
| custom logits processors of the engine     | may count on K + 1 rows of every decoding request   |
|   (`--logits-processors`, entry points)    |   unless the class says `dspark_ragged_rows = True` |
| pooling requests                           | have no drafts and no sampled token to learn from   |
| resumable (streaming-input) requests       | change their prompt while they hold their slot      |

What the whole engine cannot do (backends, data parallelism) is settled at start-up (startup.py);
rows that vLLM itself pads with placeholder drafts after a remote KV load are seen as prefill rows.
"""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

_GROUP = "vllm.logits_processors"
_DECLARATION = "dspark_ragged_rows"


def undeclared_processors(vllm_config: Any) -> tuple[str, ...]:
    """Custom logits processors of an engine that do not declare that ragged rows suit them."""
    given: Iterable[Any] = vllm_config.model_config.logits_processors or ()
    found = [(str(item), item) for item in given]
    found += [(entry.name, entry) for entry in entry_points(group=_GROUP)]
    return tuple(name for name, item in found if not getattr(_loaded(item), _DECLARATION, False))


def _loaded(item: Any) -> Any:
    """The class behind a class, an entry point or a "module:Name" string."""
    if isinstance(item, str):
        module, _, name = item.partition(":")
        return getattr(__import__(module, fromlist=[name]), name)
    return item.load() if hasattr(item, "load") else item


def exclusion(request: Any, processors: tuple[str, ...]) -> str:
    """Why steps with this request are not scheduled, or ""; processors: undeclared ones."""
    if processors:
        return f"custom logits processors ({', '.join(processors)}) may count on uniform rows"
    if request.sampling_params is None:
        return "a pooling request"
    if request.resumable:
        return "a resumable request"
    return ""
