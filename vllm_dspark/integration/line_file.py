"""JSON lines that an engine core appends while it serves (record_confidences, record_outcomes).

A file that cannot be opened ends the start, since a recording was what the user asked for. One that
cannot be written any more (a full disk) ends the recording, with a warning: serving goes on.
"""

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from vllm_dspark.errors import DSparkConfigError

logger = logging.getLogger("vllm.vllm_dspark")


class LineFile:
    """Appends one line per call. Raises DSparkConfigError if the file cannot be opened.

    option: name of the option that asked for it, for messages.
    """

    def __init__(self, path: Path, option: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # line by line: an engine core that is ended by a signal never gets to close it, and
            # readers follow the file while the engine runs
            self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise DSparkConfigError(unwritable(option, path, str(error.strerror))) from error
        self._path, self._option = path, option

    def write(self, content: dict[str, Any]) -> None:
        """Append one object; does nothing once the file has failed."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(content, separators=(",", ":")) + "\n")
        except OSError as error:
            logger.warning(
                "vllm-dspark: %s ends here, %s cannot be written: %s; serving goes on",
                self._option, self._path, error.strerror,
            )  # fmt: skip
            self._drop()

    def close(self) -> None:
        """Close the file; further lines are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop(self) -> None:
        """Close a file whose last line is half written: what is buffered will never fit."""
        try:
            self.close()
        except OSError:
            self._file = None


def unwritable(option: str, path: Path, why: str) -> str:
    """The message about a file that an option names and that cannot be written."""
    return (
        f"dspark.{option} = {str(path)!r} cannot be written: {why}; name a file in a folder that "
        "the engine may write to, or leave the option out"
    )
