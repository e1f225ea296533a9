"""Numbers on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class Whole:
    """Reads a whole number in ASCII digits, at least `least` and at most `most` where that is given."""

    least: int
    most: int | None = None
    __name__: ClassVar[str] = "integer"  # what usage errors call its values

    def __call__(self, text: str | int) -> int:
        """Raises: typer.BadParameter that says what is wrong. A default comes as the number that it is."""
        from ..native.digits import parse_whole  # --help does not wait for the engine

        try:
            value = parse_whole(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if value < self.least or (self.most is not None and value > self.most):
            raise typer.BadParameter(f"{value} is not in the range {self.range}.")
        return value

    @property
    def range(self) -> str:
        """As "x>=1" or "1<=x<=1024"."""
        return f"x>={self.least}" if self.most is None else f"{self.least}<=x<={self.most}"


@dataclass(frozen=True, slots=True)
class Real:
    """Reads a number with a fraction or without, in ASCII digits; its range is checked where it is used."""

    __name__: ClassVar[str] = "number"  # what usage errors call its values

    def __call__(self, text: str | float) -> float:
        """Raises: typer.BadParameter that says what is wrong. A default comes as the number that it is."""
        from ..native.digits import parse_real

        try:
            return parse_real(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def real(*, help: str) -> Any:
    """An option of a command that takes such a number."""
    return typer.Option(parser=Real(), metavar="NUMBER", help=help)


def whole(least: int, most: int | None = None, *, help: str) -> Any:
    """An option of a command that takes such a number."""
    parser = Whole(least, most)
    return typer.Option(parser=parser, metavar=f"INTEGER [{parser.range}]", help=help)
