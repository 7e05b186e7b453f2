"""Shell commands of the documentation, with the mark that says who runs them.

A command stands in a fenced block of the language `bash`. Its title, which readers see above the
block, is the mark:

    ```bash                                            run by tests/docs, as it stands
    ```bash title="a server"                           run as a server, stopped again
    ```bash title="while it runs"                      run beside the server block above it
    ```bash title="needs a GPU"                        not run here
    ```bash title="run by tests/x.py"                  that file (or make target) executes it, or
                                                       calls the function behind it
    ```bash title="not run: REASON"                    neither, and why

TARGET and DRAFTER in a command stand for models; a test puts a tiny pair in their place.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER, CLIENT, GPU = "a server", "while it runs", "needs a GPU"
_RUN_BY, _NOT_RUN = "run by ", "not run: "

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<rest>.*)$")
_TITLE = re.compile(r'^ title="(?P<title>[^"]*)"$')
# First words of commands; an indented or language-less block must not begin with one of these.
_COMMANDS = ("vllm", "vllm-dspark", "make", "python", "python3", "pip", "curl", "serve", "ray")
_COMMAND = re.compile(rf"^(\$ )?([A-Z_]+=\S* )*({'|'.join(_COMMANDS)})( |$)")


@dataclass(frozen=True)
class Block:
    """One fenced block of commands."""

    page: Path
    line: int
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def executed_here(self) -> bool:
        return self.title in ("", SERVER, CLIENT)

    def problem(self) -> str:
        """What is wrong with its mark, or ""."""
        if self.title.startswith(_RUN_BY):
            return _check_runner(self.title.removeprefix(_RUN_BY))
        if self.title.startswith(_NOT_RUN):
            return "" if self.title.removeprefix(_NOT_RUN).strip() else "no reason is given"
        if self.executed_here or self.title == GPU or self.title.startswith(f"{GPU}, "):
            return ""
        return f"unknown mark {self.title!r}"


def _check_runner(name: str) -> str:
    """`name`: a test or script of this repository, or a make target."""
    if name.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if name.removeprefix("make ") in targets else f"there is no target {name!r}"
    return "" if (ROOT / name).is_file() else f"there is no file {name}"


def pages() -> list[Path]:
    """Every page whose commands readers are meant to type."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "examples/train_drafter/README.md",
    ]


def blocks(page: Path) -> list[Block]:
    """The `bash` blocks of a page."""
    found: list[Block] = []
    for line, language, rest, text in _fences(page.read_text(encoding="utf-8")):
        if language != "bash":
            continue
        match = _TITLE.match(rest.rstrip())
        title = match["title"] if match else rest.strip() and f"malformed: {rest.strip()}"
        found.append(Block(page, line, title, text))
    return found


def stray_commands(page: Path) -> list[str]:
    """Commands outside `bash` blocks, where no mark can be given."""
    text = page.read_text(encoding="utf-8")
    inside: set[int] = set()
    strays = []
    for line, language, _, body in _fences(text):
        lines = body.splitlines()
        inside.update(range(line, line + len(lines) + 2))
        if language in ("", "text", "sh", "shell", "console") and any(map(_COMMAND.match, lines)):
            strays.append(f"{page.relative_to(ROOT)}:{line}")
    for number, line_text in enumerate(text.splitlines(), 1):
        indented = line_text.startswith("    ") and number not in inside
        if indented and _COMMAND.match(line_text.strip()):
            strays.append(f"{page.relative_to(ROOT)}:{number}")
    return strays


def _fences(text: str) -> Iterator[tuple[int, str, str, str]]:
    """(line of the opening fence, language, rest of its line, body) of each fenced block."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        match = _FENCE.match(lines[number])
        if not match:
            number += 1
            continue
        start, indent = number, len(match["indent"])
        body = []
        number += 1
        while number < len(lines) and lines[number].strip() != "```":
            body.append(lines[number][indent:])
            number += 1
        number += 1
        yield start + 1, match["language"], match["rest"], "\n".join(body)
