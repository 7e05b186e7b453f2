"""Engine settings in a YAML file: what `vllm-dspark serve --config FILE` reads, for Python callers.

The file goes through vLLM's own argument parser, so a value means the same as on a command line
(lists, nested objects), and what that parser refuses is refused here.
"""

from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_dspark.errors import DSparkConfigError

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ModuleNotFoundError:  # where vLLM 0.33 has it
    from vllm.entrypoints.common.cli_args import make_arg_parser


class _Parser(FlexibleArgumentParser):
    """Raises where a command line would end."""

    def error(self, message: str) -> NoReturn:
        raise DSparkConfigError(f"{self.prog}: {message}")


def engine_arguments(path: Path) -> dict[str, Any]:
    """The arguments that a file gives, by the names of `AsyncEngineArgs` and `FrontendArgs`.

    Raises DSparkConfigError for a file without `model`, unknown keys and illegal values.
    """
    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise DSparkConfigError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(given, dict) or "model" not in given:
        raise DSparkConfigError(f"{path} must be a mapping with the key 'model'; found {given!r}")
    parser = make_arg_parser(_Parser(prog=str(path)))
    parsed = vars(parser.parse_args(["--config", str(path)]))
    return {name: parsed[name] for name in (str(key).replace("-", "_") for key in given)}
