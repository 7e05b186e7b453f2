"""Write what the documentation shows of the code: the option reference and the pictures.

python tools/make_pages.py            rewrites docs/options.md and docs/assets/*.svg
python tools/make_pages.py --check    exits with 1 and names the files that are stale
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.pictures import architecture_svg, decision_svg  # noqa: E402
from vllm_dspark.config import option_reference  # noqa: E402

BEGIN, END = "<!-- generated: options -->", "<!-- end -->"


def options_table() -> str:
    """One row per option of the `"dspark"` object, in declaration order."""
    rows = [
        f"| `{option.name}` | `{option.default}` | {option.allowed} | {option.description} |"
        for option in option_reference()
    ]
    return "\n".join(["| option | default | allowed | meaning |", "|---|---|---|---|", *rows])


def with_options(page: str) -> str:
    """The page with its generated table made anew; raises ValueError without its markers."""
    head, found, rest = page.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"docs/options.md needs {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{options_table()}\n{END}{tail}"


def pages() -> dict[Path, str]:
    """What every generated file should hold."""
    options = ROOT / "docs/options.md"
    return {
        options: with_options(options.read_text(encoding="utf-8")),
        ROOT / "docs/assets/decision.svg": decision_svg(),
        ROOT / "docs/assets/architecture.svg": architecture_svg(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, report stale files")
    check = parser.parse_args().check
    stale = []
    for path, text in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
