"""Whether a file could be made: tried, and taken away again."""

import tempfile
from pathlib import Path

from vllm_dspark.artifacts.store import why_unwritable


def why_not_made(path: Path) -> str:
    """Why serving could not write a file at `path`; empty if it could.

    Permissions alone do not tell (root passes them in /proc too), so a file that is there is opened
    to append nothing, and for one that is not a folder or file of another name is made, and
    removed, in the nearest folder that exists. A full disk is not seen.
    """
    if why := why_unwritable(path):
        return why
    place = path.absolute()
    try:
        if place.exists():
            if place.is_file():  # opening a pipe would wait for its reader
                with place.open("ab"):
                    pass
            return ""
        parent = place.parent
        while not parent.exists():
            parent = parent.parent
        if parent == place.parent:
            with tempfile.NamedTemporaryFile(dir=parent, prefix=".vllm-dspark-doctor-"):
                return ""
        with tempfile.TemporaryDirectory(dir=parent, prefix=".vllm-dspark-doctor-"):
            return ""
    except OSError as error:
        where = place if place.exists() else parent
        return f"nothing can be made in {where} ({error.strerror})"
