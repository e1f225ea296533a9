"""Numbers in text are read in ASCII digits alone, whatever int() and float() would make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyloop.native.digits import is_digits, parse_real, parse_whole

# Every one of these is a number to int() or float().
FOREIGN = ["٣", "3٣", "\uff11\uff12", "१", "1_000", " 3", "3 ", "3\n", "\t3", "\U0001d7d1"]
NO_NUMBERS = ["", "+", "-", "--3", "0x10", "3L", "²", "½", "Ⅷ", "nan", "inf", "1,000", "1e", "三"]


@pytest.mark.parametrize("text", [*FOREIGN, *NO_NUMBERS])
def test_what_is_not_in_ascii_digits_is_refused(text: str) -> None:
    assert not is_digits(text)
    for parse in (parse_whole, parse_real):
        with pytest.raises(ValueError, match="digits 0-9"):
            parse(text)


def test_the_foreign_ones_are_what_python_would_read() -> None:
    for text in FOREIGN:
        assert float(text) == int(text)


@given(st.integers(-(10**18) + 1, 10**18 - 1))
def test_whole_numbers_are_read_with_and_without_a_sign(number: int) -> None:
    assert parse_whole(str(number)) == parse_whole(f"{number:+d}") == number
    assert is_digits(str(number)) == (number >= 0)


@pytest.mark.parametrize("digits", [19, 5000])
def test_numbers_of_too_many_digits_are_refused(digits: int) -> None:
    with pytest.raises(ValueError, match=f"number of {digits} digits is too large"):
        parse_whole("9" * digits)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_real_numbers_are_what_float_reads(number: float) -> None:
    assert parse_real(repr(number)) == number
    assert parse_real(".5") == parse_real("+0.5") == parse_real("5e-1") == 0.5
    assert parse_real("5.") == 5.0


@given(st.text(max_size=6))
def test_no_other_text_is_read_as_a_number(text: str) -> None:
    for parse in (parse_whole, parse_real):
        try:
            parse(text)
        except ValueError:
            continue
        assert set(text) <= set("0123456789+-.eE")
