"""Bytes of the .tloop header: little-endian scalars, strings, typed key-value records.

The one invariant: reading never trusts a length. Every read names the field it is for, is bounded by the
bytes that are there, and fails with FormatError, never with another exception. Knows nothing of tensors or
files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

Value = int | float | str | bool | tuple[int, ...]

INT, FLOAT, TEXT, INT_ARRAY, FLAG = 1, 2, 3, 4, 5

# Smallest possible record of each kind: what bounds a count before anything is built from it.
_MIN_KEY_VALUE_BYTES = 2 + 1 + 1
_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1


class FormatError(ValueError):
    """A model file, or what was to become one, breaks the format. The message names the field."""


@dataclass(slots=True)
class Cursor:
    """Reads forward through `data`; every method takes the name of the field for its error."""

    data: bytes
    at: int = 0

    def take(self, size: int, field: str) -> bytes:
        left = len(self.data) - self.at
        if size > left:
            raise FormatError(
                f"{field}: needs {size} bytes, {left} are left in the header: the file is damaged"
            )
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece

    def unpack(self, code: str, field: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field))[0])

    def real(self, field: str) -> float:
        return float(struct.unpack("<d", self.take(8, field))[0])

    def text(self, length_code: str, field: str) -> str:
        raw = self.take(self.unpack(length_code, f"length of {field}"), field)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{field}: not UTF-8 at byte {error.start}: the file is damaged") from None

    def count(self, min_record_bytes: int, field: str) -> int:
        """A u32 count, refused when that many records cannot be in what is left."""
        count = self.unpack("I", field)
        left = len(self.data) - self.at
        if count * min_record_bytes > left:
            raise FormatError(f"{field}: {count} records do not fit in the {left} bytes left in the header")
        return count


def pack_text(text: str, length_code: str, field: str) -> bytes:
    """`text` as UTF-8 behind its length. FormatError when it is too long or not encodable."""
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise FormatError(f"{field}: not encodable as UTF-8 at character {error.start}") from None
    limit = 2 ** (8 * struct.calcsize(length_code)) - 1
    if len(raw) > limit:
        raise FormatError(f"{field}: {len(raw)} bytes, the format holds {limit}")
    return struct.pack("<" + length_code, len(raw)) + raw


def pack_section(values: Mapping[str, Value], section: str) -> bytes:
    """A count and its key-value records, in the mapping's order."""
    parts = [struct.pack("<I", len(values))]
    for key, value in values.items():
        parts.append(pack_text(key, "H", f"{section} key"))
        parts.append(_pack_value(value, f"{section} {key}"))
    return b"".join(parts)


def read_section(cursor: Cursor, section: str) -> dict[str, Value]:
    """The inverse of pack_section; repeated keys and unknown types are FormatErrors."""
    values: dict[str, Value] = {}
    for _ in range(cursor.count(_MIN_KEY_VALUE_BYTES, f"{section} count")):
        key = cursor.text("H", f"{section} key")
        if key in values:
            raise FormatError(f"{section} {key!r}: given twice")
        values[key] = _read_value(cursor, f"{section} {key!r}")
    return values


def _pack_value(value: Value, field: str) -> bytes:
    if isinstance(value, bool):  # before int: a bool is an int in Python
        return struct.pack("<BB", FLAG, value)
    if isinstance(value, int):
        return struct.pack("<Bq", INT, _int64(value, field))
    if isinstance(value, float):
        return struct.pack("<Bd", FLOAT, value)
    if isinstance(value, str):
        return bytes([TEXT]) + pack_text(value, "I", field)
    if isinstance(value, tuple):
        items = [_int64(item, field) for item in value]
        return struct.pack(f"<BI{len(items)}q", INT_ARRAY, len(items), *items)
    raise FormatError(f"{field}: a value of type {type(value).__name__} has no record type")


def _int64(value: int, field: str) -> int:
    if not _I64_MIN <= value <= _I64_MAX:
        raise FormatError(f"{field}: {value} is outside 64 bits")
    return value


def _read_value(cursor: Cursor, field: str) -> Value:
    kind = cursor.unpack("B", f"type of {field}")
    if kind == INT:
        return cursor.unpack("q", field)
    if kind == FLOAT:
        return cursor.real(field)
    if kind == TEXT:
        return cursor.text("I", field)
    if kind == INT_ARRAY:
        return tuple(cursor.unpack("q", field) for _ in range(cursor.count(8, f"count of {field}")))
    if kind == FLAG:
        flag = cursor.unpack("B", field)
        if flag > 1:
            raise FormatError(f"{field}: a flag is 0 or 1, found {flag}")
        return bool(flag)
    raise FormatError(f"{field}: unknown value type {kind}, 1 to 5 are known")
