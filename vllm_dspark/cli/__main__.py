"""Where the `vllm-dspark` command begins; also `python -m vllm_dspark.cli`.

Apart from main.py, whose imports alone can take seconds on a cold disk: Ctrl-C during them ends the
command as it does later on, without a stack trace.
"""

import sys


def main() -> None:
    """Run the command."""
    try:
        from vllm_dspark.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
