"""An engine for the measuring commands, built from the arguments that `vllm serve` would take.

A measurement is worth something to a server only if both see the same engine config, so the
arguments go through vLLM's own parser and defaults of `vllm serve`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vllm_dspark.config import process_environment
from vllm_dspark.errors import DSparkError, EngineError
from vllm_dspark.integration.carrier import carried_by, options_of

logger = logging.getLogger("vllm.vllm_dspark")

Content = str | tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TokenPrompt:
    """One request: `name` is unique in its run, tokens carry the chat template if there is one.

    temperature 0 is greedy. Requests get no seed of their own, the engine's decides: a seeded
    request repeats its noise and keeps its windows, which is not how traffic looks.
    """

    name: str
    tokens: tuple[int, ...]
    temperature: float
    max_tokens: int


def parse_serve_arguments(arguments: Sequence[str]) -> Any:
    """`AsyncEngineArgs` of a `vllm serve` command line; exits with code 2 like vLLM's parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm-dspark")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    ServeSubcommand().subparser_init(subparsers)
    parsed = parser.parse_args(["serve", *arguments])
    if getattr(parsed, "model_tag", None) is not None:
        parsed.model = parsed.model_tag
    return AsyncEngineArgs.from_cli_args(parsed)


def describe_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Identity of the engine that a `vllm serve` command line would start, without starting it.

    The same keys as integration/measuring.describe. Raises EngineError for a config that vLLM
    refuses, DSparkError for illegal options.
    """
    from vllm_dspark.integration.startup import describe_config

    with _as_engine_error():
        config = parse_serve_arguments(arguments).create_engine_config()
    options = options_of(config)
    if options is None:
        raise EngineError(
            "these arguments start no DSpark engine; name a drafter with --speculative-config"
        )
    return describe_config(config, options)


@contextmanager
def _as_engine_error() -> Iterator[None]:
    """vLLM's refusals as one error of ours; our own pass through."""
    try:
        yield
    except DSparkError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"no engine with these arguments: {error}; `vllm-dspark serve` with them must work "
            "first"
        ) from error


class OfflineEngine:
    """A running engine without a server; a context manager.

    arguments: as for `vllm serve`; options: changes to the `"dspark"` object of the speculative
    config. Raises EngineError if the engine does not start, DSparkError for illegal options.
    """

    def __init__(self, arguments: Sequence[str], options: Mapping[str, Any]) -> None:
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        # An engine core of its own unless told otherwise, so that it is as alone as in a server.
        own_core = process_environment().get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
        with _as_engine_error():
            args = parse_serve_arguments(arguments)
            given = dict(args.speculative_config or {})
            given["dspark"] = {**(given.get("dspark") or {}), **options}
            args.speculative_config = given
            args.disable_log_stats = True
            self._engine = LLMEngine.from_engine_args(
                args,
                usage_context=UsageContext.OPENAI_API_SERVER,  # its default batch sizes
                enable_multiprocessing=own_core,
            )
        self.vllm_config = self._engine.vllm_config
        carried = carried_by(self.vllm_config)
        if carried is None or carried.declined:
            self.close()
            raise EngineError(
                "these arguments start an engine in which the plugin has no part: name a drafter "
                "with --speculative-config, and leave worker_cls and scheduler_cls alone"
            )

    # ---- prompts

    @property
    def max_prompt_tokens(self) -> int:
        """Prompt tokens that fit into the model's context."""
        return int(self.vllm_config.model_config.max_model_len) - 1

    @property
    def num_speculative_tokens(self) -> int:
        """K."""
        return int(self.vllm_config.speculative_config.num_speculative_tokens)

    def encode(self, content: Content, *, chat: bool = True) -> tuple[int, ...]:
        """Tokens of a text (a user's message) or of (role, text) messages.

        chat: through the chat template, if the tokenizer has one; otherwise as plain text.
        """
        tokenizer: Any = self._engine.renderer.tokenizer
        messages = (("user", content),) if isinstance(content, str) else content
        if chat and getattr(tokenizer, "chat_template", None):
            listed = [{"role": role, "content": text} for role, text in messages]
            text = tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        return tuple(tokenizer.encode("\n".join(text for _, text in messages)))

    def run(self, prompts: Iterable[TokenPrompt]) -> Iterator[tuple[str, int]]:
        """Generate for all prompts; yields (name, tokens generated) as requests finish."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self._engine
        for prompt in prompts:
            room = self.max_prompt_tokens + 1 - len(prompt.tokens)
            engine.add_request(
                prompt.name,
                {"prompt_token_ids": list(prompt.tokens)},
                SamplingParams(
                    temperature=prompt.temperature,
                    max_tokens=min(prompt.max_tokens, room),
                    detokenize=False,
                ),
            )
        while engine.has_unfinished_requests():
            try:
                outputs = engine.step()
            except EngineDeadError as error:
                raise EngineError("the engine died while it generated; see its log") from error
            for output in outputs:
                if output.finished:
                    yield output.request_id, len(output.outputs[0].token_ids)

    # ---- workers

    def call(self, method: str, *arguments: Any) -> Any:
        """Result of a method of integration/measuring.py on the output rank's worker.

        All ranks run it. Arguments and result travel as JSON text, which vLLM's codec passes on
        unchanged. Raises EngineError with the worker's message.
        """
        answers = self._engine.collective_rpc(
            "dspark_call", args=(method, json.dumps(list(arguments)))
        )
        found = [json.loads(answer) for answer in answers if answer]
        if not found:
            raise EngineError(f"no worker answered {method!r}")
        if "error" in found[0]:
            raise EngineError(found[0]["error"])
        return found[0]["value"]

    # ---- life

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
