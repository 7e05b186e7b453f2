"""Where the `vllm-dspark` command begins; also `python -m vllm_dspark.cli`.

Apart from main.py, whose imports alone can take seconds on a cold disk: Ctrl-C during them ends the
command as it does later on, without a stack trace. The one place that turns what the system refuses
(a full disk behind standard output, say) into one line, whichever command was writing.
"""

import contextlib
import errno
import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command."""
    try:
        try:
            from vllm_dspark.cli.main import app

            app()
        finally:  # what is still buffered belongs to the command: its failure is the command's
            sys.stdout.flush()
    except SystemExit as leaving:
        cause = getattr(leaving.__context__, "__cause__", None)
        if not isinstance(cause, KeyboardInterrupt):  # typer turns it into an exit without a word
            raise
        _leave("vllm-dspark: interrupted", INTERRUPTED)
    except KeyboardInterrupt:
        _leave("vllm-dspark: interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader (`| head`) has what it wanted
        _leave("", 1)
    except OSError as error:
        _leave(f"vllm-dspark: error: {_said(error)}", 1)


def _said(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return f"cannot write the output: {error.strerror}; make room, or write elsewhere"
    return error.strerror or str(error)


def _leave(line: str, code: int) -> None:
    """Exit with one line. What standard output still buffers is dropped: it failed already."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if line:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
