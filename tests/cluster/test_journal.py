"""The journal loses nothing but what a kill tore off its end."""

from __future__ import annotations

import itertools
import struct
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.cluster.errors import InfrastructureError
from tinyloop.cluster.journal import Journal, read_records

RECORDS = [[(0, b"zero\n"), (2, b"two\n")], [(1, b"x" * 300)], [(5, b"\xff\x00")]]


def write(folder: Path, records: list[list[tuple[int, bytes]]]) -> Path:
    journal = Journal(folder)
    for record in records:
        journal.append(record)
    journal.close()
    return max(folder.glob("*.journal"))


def test_what_was_appended_is_recovered(tmp_path: Path) -> None:
    write(tmp_path, RECORDS)
    assert Journal(tmp_path).recover(0) == dict(itertools.chain(*RECORDS))
    assert Journal(tmp_path).recover(2) == {2: b"two\n", 5: b"\xff\x00"}


def test_a_file_cut_at_any_byte_gives_its_whole_records_alone(tmp_path: Path) -> None:
    content = write(tmp_path, RECORDS).read_bytes()
    cut = tmp_path / "cut"
    for length in range(len(content) + 1):
        cut.write_bytes(content[:length])
        got = list(read_records(cut))
        assert got == RECORDS[: len(got)]
    assert len(got) == len(RECORDS)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_read_as_a_record(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    path = write(folder, RECORDS)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    got = list(read_records(path))
    assert got == RECORDS[: len(got)]
    assert len(got) < len(RECORDS)


def test_records_after_a_torn_one_are_in_another_file_and_found(tmp_path: Path) -> None:
    path = write(tmp_path, RECORDS)
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path, [[(9, b"nine\n")]])
    assert Journal(tmp_path).recover(0) == {0: b"zero\n", 2: b"two\n", 1: b"x" * 300, 9: b"nine\n"}


def test_the_first_record_of_a_row_holds(tmp_path: Path) -> None:
    write(tmp_path, [[(0, b"first\n")]])
    write(tmp_path, [[(0, b"second\n")]])
    assert Journal(tmp_path).recover(0) == {0: b"first\n"}


def test_files_are_removed_when_their_rows_are_committed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([(0, b"a"), (3, b"d")])
    journal.forget(2)
    assert journal.recover(2) == {3: b"d"}
    journal.append([(2, b"c")])
    journal.forget(4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["foo.journal", "1.journal", "notes.txt", "000007.journal/"])
def test_what_no_job_wrote_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir() if name.endswith("/") else path.touch()
    with pytest.raises(InfrastructureError, match=f"{path.name}.*move it away"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00", b"\xc1", b"\x93", *map(msgpack.packb, ([], {}, 5, [1], [[1]], [["a", b""]], [[1, "a"]]))],
)
def test_a_record_that_no_job_wrote_ends_the_file(tmp_path: Path, payload: bytes) -> None:
    path = write(tmp_path, RECORDS)
    with path.open("ab") as file:
        file.write(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
    assert list(read_records(path)) == RECORDS


def test_a_file_that_cannot_be_read_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append([(0, b"a")])

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InfrastructureError, match=r"cannot read.*Permission denied"):
        journal.recover(0)


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (tmp_path / "journal").rmdir()
    with pytest.raises(InfrastructureError, match="--resume"):
        journal.append([(0, b"a")])
