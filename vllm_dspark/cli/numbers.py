"""Numbers of the command line, judged before anything is compiled, loaded or started.

Typer's own `min` and `max` do not say which value they refuse, let NaN through, and know no lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import typer

from vllm_dspark.cli.exits import EXIT_USAGE, fail
from vllm_dspark.errors import InputError

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Within(Generic[_Number]):
    """Reads one number of a range.

    least and most are allowed, unless `open_below` says that least is not.
    """

    kind: Callable[[str], _Number]
    least: float
    most: float
    open_below: bool = False

    def __call__(self, text: str) -> _Number:
        """Raises ValueError with value and range."""
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError(f"{text.strip()!r} is no {self._what}") from None
        return self.check(value)

    def check(self, value: _Number) -> _Number:
        """Raises ValueError with value and range."""
        above = value > self.least if self.open_below else value >= self.least
        if not (above and value <= self.most):  # NaN fails both
            raise ValueError(f"{value} is outside of what is allowed: a {self._what}")
        return value

    @property
    def range(self) -> str:
        """For help texts and messages."""
        start = f"above {_plain(self.least)}, up" if self.open_below else _plain(self.least)
        return f"{start} to {_plain(self.most)}"

    @property
    def _what(self) -> str:
        noun = "whole number" if self.kind is int else "number"
        return f"{noun} {'' if self.open_below else 'from '}{self.range}"


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def number(*names: str, min: float, max: float, help: str = "", **others: Any) -> Any:
    """A typer.Option for one number (or several, if it may be repeated) from `min` to `max`."""
    allowed: Within[Any] = Within(float, min, max)

    def judge(param: typer.CallbackParam, value: Any) -> Any:
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is None:
                continue
            try:
                Within(int if isinstance(each, int) else float, min, max).check(each)
            except ValueError as error:
                fail(f"{sorted(param.opts, key=len)[-1]}: {error}", EXIT_USAGE)
        return value

    text = (
        f"{help} ({allowed.range})" if help else f"{allowed.range[0].upper()}{allowed.range[1:]}."
    )
    return typer.Option(*names, callback=judge, help=text.strip(), **others)


def number_list(
    option: str, text: str, read: Callable[[str], _Number], *, needed: bool = True
) -> tuple[_Number, ...]:
    """Comma-separated numbers of an option; InputError names option, value and range.

    needed: whether an empty text is an error.
    """
    parts = text.split(",") if text.strip() else []
    if not any(part.strip() for part in parts) and (needed or parts):
        raise InputError(f"{option} {text!r}: give at least one number")
    if not all(part.strip() for part in parts):
        raise InputError(f"{option} {text!r}: there is no number between two commas, or beside one")
    try:
        return tuple(read(part) for part in parts)
    except ValueError as error:
        raise InputError(f"{option} {text!r}: {error}; write commas between numbers") from error
