"""Write docs/support-matrix.md from recorded test outcomes.

make test ARGS="--record-support docs/support-outcomes.json"
python tools/support_matrix.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.matrix import render  # noqa: E402 - the path is set above

RECORD = ROOT / "docs/support-outcomes.json"
PAGE = ROOT / "docs/support-matrix.md"


def main() -> None:
    PAGE.write_text(render(json.loads(RECORD.read_text())))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
