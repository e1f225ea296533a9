"""The .tloop file, version 1: writer and checking reader.

A file is a fixed prefix of 64 bytes, a header (descriptor, metadata, tensor table, place of the tokenizer),
then tensor data and the tokenizer, each at a multiple of 256 bytes so that the file can be mapped.
Everything is little-endian. The reader trusts nothing: every length, product, offset, gap and checksum is
held against the file before it is used.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .descriptor import check_descriptor, expected_tensors
from .layout import (
    MAX_HEADER_BYTES,
    MIN_TENSOR_BYTES,
    PREFIX_BYTES,
    TOKENIZER_BYTES,
    Header,
    TensorEntry,
    align,
    check_names,
    check_places,
    check_prefix,
    check_table,
    metadata_texts,
    pack_entry,
    pack_prefix,
    read_entry,
)
from .records import Cursor, FormatError, Value, pack_section, read_section
from .regular_file import check_regular
from .weights import QuantWeight, Tensor, decode_tensor, encode_tensor, tensor_kind

__all__ = [
    "FormatError",
    "Header",
    "QuantWeight",
    "TensorEntry",
    "check_destination",
    "read_header",
    "read_tensor",
    "write_model",
]


def write_model(
    path: Path,
    descriptor: Mapping[str, Value],
    tensors: Mapping[str, Tensor],
    tokenizer_json: bytes,
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> Header:
    """Write a model file whole or not at all: into a temporary neighbour, synced, then renamed.

    tensors: exactly the names and dims that the descriptor calls for, each float16, float32 or a QuantWeight.
    Raises: FormatError when anything breaks the format; FileExistsError when `path` exists, without
    overwrite; OSError naming `path` when it cannot be written.
    """
    checked = check_descriptor(descriptor)
    expected = expected_tensors(checked)
    check_names(set(tensors), set(expected))
    blobs = {name: encode_tensor(name, tensors[name]) for name in expected}
    head = pack_section(checked, "descriptor") + pack_section(dict(metadata), "metadata")
    table_bytes = sum(
        MIN_TENSOR_BYTES + len(name.encode()) + 8 * (len(expected[name]) - 1) for name in expected
    )
    header_bytes = len(head) + 4 + table_bytes + TOKENIZER_BYTES
    if header_bytes > MAX_HEADER_BYTES:
        raise FormatError(f"header_bytes: {header_bytes}, the format holds {MAX_HEADER_BYTES}")
    offset = data_offset = align(PREFIX_BYTES + header_bytes)
    entries = []
    for name, blob in blobs.items():
        entries.append(_entry(name, tensors[name], offset, blob))
        offset = align(offset + len(blob))
    check_table(checked, entries)
    head += struct.pack("<I", len(entries)) + b"".join(pack_entry(entry) for entry in entries)
    head += struct.pack("<QQI", offset, len(tokenizer_json), zlib.crc32(tokenizer_json))
    prefix = pack_prefix(zlib.crc32(head), len(head), data_offset, offset + len(tokenizer_json))
    _publish(path, [prefix + head, *blobs.values(), tokenizer_json], overwrite)
    return read_header(path)


def _entry(name: str, tensor: Tensor, offset: int, blob: bytes) -> TensorEntry:
    dims = tensor.dims if isinstance(tensor, QuantWeight) else tensor.shape
    group = tensor.group if isinstance(tensor, QuantWeight) else 0
    return TensorEntry(name, tensor_kind(tensor), dims, group, offset, len(blob), zlib.crc32(blob))


def check_destination(path: Path) -> None:
    """Raises: FileNotFoundError or NotADirectoryError where there is no folder to write `path` into."""
    if not path.parent.exists():
        raise FileNotFoundError(f"write {path}: the folder {path.parent} does not exist: make it first")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"write {path}: {path.parent} is not a folder")


def _publish(path: Path, blocks: Iterable[bytes], overwrite: bool) -> None:
    """Blocks at aligned offsets, the last one unpadded, under the final name only once they are on disk."""
    check_destination(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"write {path}: the file exists: choose another name or ask to overwrite it")
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:  # it names the temporary file, which nobody asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            for block in blocks:
                file.write(bytes(align(file.tell()) - file.tell()))
                file.write(block)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_header(path: Path) -> Header:
    """Everything but the weights, checked.

    Raises: FormatError naming the field, or what is no regular file; OSError when the file cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        size = os.fstat(file.fileno()).st_size
        header_bytes, data_offset, crc = check_prefix(prefix, size)
        head = file.read(header_bytes)
        if zlib.crc32(head) != crc:
            raise FormatError("header_crc32: the header does not match its checksum: the file is damaged")
        cursor = Cursor(head)
        descriptor = check_descriptor(read_section(cursor, "descriptor"))
        metadata = metadata_texts(read_section(cursor, "metadata"))
        entries = [read_entry(cursor) for _ in range(cursor.count(MIN_TENSOR_BYTES, "tensor count"))]
        tokenizer = (cursor.unpack("Q", "tokenizer offset"), cursor.unpack("Q", "tokenizer bytes"))
        tokenizer_crc = cursor.unpack("I", "tokenizer crc32")
        if cursor.at != len(head):
            raise FormatError(f"header_bytes: {len(head) - cursor.at} bytes are left after the last section")
        check_table(descriptor, entries)
        check_places(file, entries, tokenizer, PREFIX_BYTES + header_bytes, data_offset, size)
        file.seek(tokenizer[0])
        tokenizer_json = file.read(tokenizer[1])
    if zlib.crc32(tokenizer_json) != tokenizer_crc:
        raise FormatError("tokenizer crc32: the tokenizer does not match its checksum: the file is damaged")
    digest = hashlib.sha256(prefix + head).hexdigest()
    return Header(descriptor, metadata, tuple(entries), tokenizer_json, digest, size)


def read_tensor(path: Path, header: Header, name: str) -> NDArray[np.float32]:
    """The tensor as float32 with its dims, dequantized; FormatError when its bytes break their checksum."""
    entry = header.entry(name)
    return decode_tensor(entry.kind, entry.dims, entry.group, read_blob(path, entry))


def read_blob(path: Path, entry: TensorEntry) -> bytes:
    """The stored bytes of one tensor, held against their checksum."""
    with path.open("rb") as file:
        file.seek(entry.offset)
        blob = file.read(entry.n_bytes)
    if len(blob) != entry.n_bytes or zlib.crc32(blob) != entry.crc32:
        raise FormatError(
            f"crc32 of {entry.name!r}: the data do not match their checksum: the file is damaged"
        )
    return blob
