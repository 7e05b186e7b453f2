"""Write docs/support-matrix.md and docs/known-reports.md from recorded test outcomes.

make test ARGS="--record-support=docs/support-outcomes.json"
python tools/support_matrix.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.known_reports import render_reports  # noqa: E402 - the path is set above
from tests.support.matrix import render  # noqa: E402

RECORD = ROOT / "docs/support-outcomes.json"
PAGES = {"docs/support-matrix.md": render, "docs/known-reports.md": render_reports}


def main() -> None:
    record = json.loads(RECORD.read_text())
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(record))
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
