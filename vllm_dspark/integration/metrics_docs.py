"""The tables of docs/metrics.md, generated from the catalog.

python -m vllm_dspark.integration.metrics_docs docs/metrics.md    rewrites them in place
"""

import sys
from pathlib import Path

from vllm_dspark.integration.metrics_catalog import (
    START_FALLBACKS,
    STEP_FALLBACKS,
    Family,
    catalog,
)

_BEGIN = "<!-- generated: {} -->"
_END = "<!-- end -->"


def metrics_table() -> str:
    """One row per metric."""
    rows = [
        f"| `{family.full_name}{'_total' if family.kind == 'counter' else ''}` | {family.kind} "
        f"| {_labels(family)} | {family.help} |"
        for family in catalog(7)
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def fallbacks_table() -> str:
    """One row per reason of `vllm:dspark_fallbacks_total`."""
    rows = [f"| `{reason}` | steps | {text} |" for reason, text in STEP_FALLBACKS.items()]
    rows += [f"| `{reason}` | engine starts | {text} |" for reason, text in START_FALLBACKS.items()]
    return "\n".join(["| reason | counts | meaning |", "|---|---|---|", *rows])


def _labels(family: Family) -> str:
    if family.kind == "histogram":
        return "`le`"
    return ", ".join(f"`{name}`" for name in family.labels) or "none"


def rewrite(text: str) -> str:
    """The page with its generated parts made anew; raises ValueError if a marker is missing."""
    for name, table in (("metrics", metrics_table()), ("fallbacks", fallbacks_table())):
        begin = _BEGIN.format(name)
        if text.count(begin) != 1:
            raise ValueError(f"the page needs the marker {begin} exactly once")
        head, rest = text.split(begin)
        _, end, tail = rest.partition(_END)
        if not end:
            raise ValueError(f"{begin} is not followed by {_END}")
        text = f"{head}{begin}\n{table}\n{_END}{tail}"
    return text


def main(arguments: list[str]) -> int:
    """Rewrite the page named on the command line."""
    page = Path(arguments[0])
    before = page.read_text(encoding="utf-8")
    after = rewrite(before)
    if after != before:  # others may be reading it
        page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
