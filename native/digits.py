"""Numbers written by people: in the digits 0-9 alone.

int() and float() also read the digits of every other script, underscores and surrounding blanks; what looks
like a typing error in a terminal would then be a setting.
"""

from __future__ import annotations

import re

_SIGN = re.compile("[+-]?")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_MOST_DIGITS = 18  # what 64 bits hold whatever the digits are


def is_digits(text: str) -> bool:
    """Whether the text is one or more of 0-9 and nothing else."""
    return text.isascii() and text.isdigit()


def parse_whole(text: str) -> int:
    """Read a whole number, a sign before it or none. Raises: ValueError that says what is wrong."""
    digits = _SIGN.sub("", text, count=1)
    if not is_digits(digits):
        raise ValueError(f"{text!r:.60} is no whole number: write it in the digits 0-9 alone")
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large: give one of {_MOST_DIGITS} at most")
    return int(text)


def parse_real(text: str) -> float:
    """Read a number with or without a fraction or exponent. Raises: ValueError that says what is wrong."""
    if not _REAL.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no number: write it in the digits 0-9 and a point")
    return float(text)
