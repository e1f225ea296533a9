"""Where everything lies in a .tloop file: fixed prefix, header records, tensor table, places in the file.

Pure checks over what was read; knows nothing of weights' values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from .descriptor import Descriptor, expected_tensors, tensor_count
from .records import Cursor, FormatError, Value, pack_text
from .weights import KINDS, check_table_entry

MAGIC = b"TINYLOOP"
VERSION = 1
ALIGNMENT = 256
PREFIX_BYTES = 64
# A header holds names, sizes and a chat template: far below this. The cap bounds what damage can allocate.
MAX_HEADER_BYTES = 64 * 2**20

_PREFIX = struct.Struct("<8sIIQQQ24s")
MIN_TENSOR_BYTES = 2 + 1 + 1 + 8 + 4 + 8 + 8 + 4
TOKENIZER_BYTES = 8 + 8 + 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One line of the tensor table. kind is "f32", "f16", "q4" or "q8"; group is 0 unless quantized."""

    name: str
    kind: str
    dims: tuple[int, ...]
    group: int
    offset: int
    n_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Header:
    """All of a model file but its weights. digest: sha256 of the prefix and header, the model's identity."""

    descriptor: Descriptor
    metadata: dict[str, str]
    tensors: tuple[TensorEntry, ...]
    tokenizer_json: bytes
    digest: str
    file_bytes: int

    def entry(self, name: str) -> TensorEntry:
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise FormatError(f"tensor {name!r}: not in the table")


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack_prefix(header_crc32: int, header_bytes: int, data_offset: int, file_bytes: int) -> bytes:
    """The 64 bytes before the header."""
    return _PREFIX.pack(MAGIC, VERSION, header_crc32, header_bytes, data_offset, file_bytes, bytes(24))


def pack_entry(entry: TensorEntry) -> bytes:
    dims = struct.pack(f"<BB{len(entry.dims)}Q", KINDS[entry.kind], len(entry.dims), *entry.dims)
    place = struct.pack("<IQQI", entry.group, entry.offset, entry.n_bytes, entry.crc32)
    return pack_text(entry.name, "H", "tensor name") + dims + place


def check_prefix(prefix: bytes, size: int) -> tuple[int, int, int]:
    """(header_bytes, data_offset, header_crc32) of a prefix that fits a file of `size` bytes."""
    if len(prefix) < PREFIX_BYTES:
        raise FormatError(f"file size: {size} bytes, a model file has more than {PREFIX_BYTES}")
    magic, version, crc, header_bytes, data_offset, file_bytes, reserved = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise FormatError(f"magic: found {magic!r}, a model file starts with {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"version: found {version}, this build reads {VERSION}")
    if file_bytes != size:
        raise FormatError(
            f"file_bytes: the header says {file_bytes}, the file has {size}: it is cut or padded"
        )
    if header_bytes > min(MAX_HEADER_BYTES, size - PREFIX_BYTES):
        raise FormatError(f"header_bytes: {header_bytes} does not fit in a file of {size} bytes")
    if data_offset % ALIGNMENT or not PREFIX_BYTES + header_bytes <= data_offset <= size:
        raise FormatError(f"data_offset: {data_offset} is not a multiple of {ALIGNMENT} after the header")
    if any(reserved):
        raise FormatError("reserved bytes: not zero: written by a newer version or damaged")
    return header_bytes, data_offset, crc


def metadata_texts(values: dict[str, Value]) -> dict[str, str]:
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    if len(texts) != len(values):
        raise FormatError(f"metadata {next(key for key in values if key not in texts)!r}: not a text")
    return texts


def read_entry(cursor: Cursor) -> TensorEntry:
    name = cursor.text("H", "tensor name")
    code, rank = cursor.unpack("B", f"kind of {name!r}"), cursor.unpack("B", f"rank of {name!r}")
    if rank not in (1, 2):
        raise FormatError(f"rank of {name!r}: {rank} is neither 1 nor 2")
    kind = next((kind for kind, known in KINDS.items() if known == code), None)
    if kind is None:
        raise FormatError(f"kind of {name!r}: {code} is none of {sorted(KINDS.values())}")
    dims = tuple(cursor.unpack("Q", f"dims of {name!r}") for _ in range(rank))
    group = cursor.unpack("I", f"group of {name!r}")
    offset, n_bytes = cursor.unpack("Q", f"offset of {name!r}"), cursor.unpack("Q", f"bytes of {name!r}")
    check_table_entry(name, kind, dims, group, n_bytes)
    return TensorEntry(name, kind, dims, group, offset, n_bytes, cursor.unpack("I", f"crc32 of {name!r}"))


def check_table(descriptor: Descriptor, entries: list[TensorEntry]) -> None:
    names = {entry.name for entry in entries}
    if len(names) != len(entries):
        raise FormatError("tensor table: a name is given twice")
    if tensor_count(descriptor) != len(entries):
        raise FormatError(
            f"tensor count: {len(entries)}, the descriptor calls for {tensor_count(descriptor)}"
        )
    expected = expected_tensors(descriptor)
    check_names(names, set(expected))
    for entry in entries:
        if entry.dims != expected[entry.name]:
            raise FormatError(
                f"dims of {entry.name!r}: {list(entry.dims)}, "
                f"the descriptor calls for {list(expected[entry.name])}"
            )


def check_names(found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise FormatError(f"tensor {missing[0]!r}: missing ({len(missing)} in all)")
    if extra := sorted(found - expected):
        raise FormatError(f"tensor {extra[0]!r}: unknown ({len(extra)} in all)")


def check_places(
    file: BinaryIO,
    entries: list[TensorEntry],
    tokenizer: tuple[int, int],
    head_end: int,
    data_offset: int,
    size: int,
) -> None:
    """Tensors in table order, then the tokenizer, with only zeros between and nothing after."""
    places = [(f"offset of {entry.name!r}", entry.offset, entry.n_bytes) for entry in entries]
    end, expected_offset = head_end, data_offset
    for field, offset, n_bytes in [*places, ("tokenizer offset", *tokenizer)]:
        if offset != expected_offset:
            raise FormatError(f"{field}: {offset}, the layout puts it at {expected_offset}")
        if offset + n_bytes > size:
            raise FormatError(f"{field}: {offset} and {n_bytes} bytes reach past the file's {size}")
        _check_gap(file, end, offset, field)
        end, expected_offset = offset + n_bytes, align(offset + n_bytes)
    if end != size:
        raise FormatError(f"file_bytes: {size - end} bytes lie after the tokenizer")


def _check_gap(file: BinaryIO, begin: int, end: int, field: str) -> None:
    file.seek(begin)
    while begin < end:
        piece = file.read(min(end - begin, 2**20))
        if not piece or any(piece):
            raise FormatError(f"gap before {field}: not zero")
        begin += len(piece)
