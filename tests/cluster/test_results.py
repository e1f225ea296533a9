"""Parts, the folder's lock and contents, and the fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinyloop.cluster.encoding import EncodingPolicy
from tinyloop.cluster.errors import InfrastructureError, UsageError
from tinyloop.cluster.fingerprint import fingerprint, refuse_differences
from tinyloop.cluster.folder import LOCK, JobFolder, refuse_inputs
from tinyloop.cluster.inputs import InputFile
from tinyloop.cluster.results import Parts, publish
from tinyloop.cluster.sources.places import local
from tinyloop.cluster.tasks import TaskOptions

LINES = [b'{"id": "0"}\n', b'{"class": "wrong_type"}\n', b'{"id": "2"}\n', b'{"id": "3"}\n']


def test_parts_are_found_again_and_published_in_order(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    parts.commit(LINES[:2])
    parts.commit(LINES[2:])
    again = Parts(tmp_path / "parts")
    assert (again.end, again.num_failures) == (4, 1)
    publish(again, tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == LINES[0] + LINES[2] + LINES[3]
    assert (tmp_path / "errors.jsonl").read_bytes() == LINES[1]
    again.remove()
    assert not (tmp_path / "parts").exists()


def test_half_written_parts_do_not_count(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.commit(LINES[:2])
    (tmp_path / "000000000002-000000000004-00000000.jsonl.tmp").write_bytes(LINES[2])
    assert Parts(tmp_path).end == 2
    assert not list(tmp_path.glob("*.tmp"))


DAMAGES = {
    "gap": "does not follow",
    "short": "damaged",
    "digit": "damaged",
    "torn": "damaged",
    "stranger": "notes.txt.*move it away",
    "folder": "cannot read",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_are_not_what_was_committed_are_refused(tmp_path: Path, damage: str) -> None:
    parts = Parts(tmp_path)
    parts.commit(LINES[:2])
    parts.commit(LINES[2:])
    first = min(tmp_path.iterdir())
    content = first.read_bytes()
    if damage == "stranger":
        (tmp_path / "notes.txt").write_text("mine")
    elif damage in ("gap", "folder"):
        first.unlink()
    else:
        changed = {"short": LINES[0], "digit": content.replace(b"0", b"7"), "torn": content[:-3]}
        first.write_bytes(changed[damage])
    if damage == "folder":
        first.mkdir()
    with pytest.raises(InfrastructureError, match=DAMAGES[damage]):
        Parts(tmp_path)


def test_a_part_damaged_after_it_was_found_is_not_published(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    parts.commit(LINES)
    (path,) = (tmp_path / "parts").iterdir()
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    with pytest.raises(InfrastructureError, match="damaged"):
        publish(parts, tmp_path)
    assert not (tmp_path / "results.jsonl").exists()


def test_a_folder_is_held_by_one_job_at_a_time(tmp_path: Path) -> None:
    folder = JobFolder.open(tmp_path / "out", None, resume=False, overwrite=False)
    for flags in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(UsageError, match="another job"):
            JobFolder.open(tmp_path / "out", None, **flags)
    with pytest.raises(UsageError, match="another job"):
        JobFolder.open(tmp_path / "other", tmp_path / "out", resume=True, overwrite=False)
    folder.close()
    JobFolder.open(tmp_path / "out", None, resume=False, overwrite=False).close()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_something_in_it_needs_a_flag(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("old\n")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        JobFolder.open(tmp_path, None, resume=False, overwrite=False)
    with pytest.raises(UsageError, match="exclude"):
        JobFolder.open(tmp_path, None, resume=True, overwrite=True)
    with pytest.raises(UsageError, match=r"no job to resume"):
        JobFolder.open(tmp_path, None, resume=True, overwrite=False)
    folder = JobFolder.open(tmp_path, None, resume=False, overwrite=True)
    assert (tmp_path / "results.jsonl").read_text() == "old\n"
    folder.clear()
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["parts/rows.jsonl", "journal/day.journal", "parts", "results.jsonl/a"])
def test_overwrite_never_removes_what_no_job_wrote(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UsageError, match="move it away"):
        JobFolder.open(tmp_path, None, resume=False, overwrite=True)
    assert path.read_text() == "mine"


def test_a_file_that_comes_into_parts_during_a_job_outlasts_it(tmp_path: Path) -> None:
    folder = JobFolder.open(tmp_path, None, resume=False, overwrite=False)
    Parts(tmp_path / "parts").commit(LINES)
    (tmp_path / "parts" / "mine.txt").write_text("mine")
    folder.remove_work()
    folder.close()
    assert [path.name for path in tmp_path.rglob("*")] == ["parts", "mine.txt"]


def test_an_input_that_the_job_would_overwrite_is_refused(tmp_path: Path) -> None:
    for name in ("results.jsonl", "parts/any.jsonl", "results.jsonl.tmp", LOCK, "work.json"):
        for work in (None, tmp_path / "work"):
            with pytest.raises(UsageError, match="output of this job"):
                refuse_inputs([local(tmp_path / name)], tmp_path, work)
    with pytest.raises(UsageError, match="output of this job"):
        refuse_inputs([local(tmp_path / "work" / "fingerprint.json")], tmp_path, tmp_path / "work")
    refuse_inputs([local(tmp_path / "rows.jsonl")], tmp_path, None)


def test_every_difference_of_two_fingerprints_is_listed() -> None:
    policy = EncodingPolicy(vocab_size=10, max_rows=8, prefix_id=1)
    file = InputFile(local("a"), "a", 1, "aa", 1, 0)
    identity = {"digest": "d", "depth": 2}
    old = fingerprint(identity, policy, TaskOptions(), [file], {"limit": None})
    refuse_differences(old, dict(old))
    other = InputFile(local("a"), "a", 1, "bb", 1, 0)
    new = fingerprint(identity | {"depth": 3}, policy, TaskOptions(pmi=True), [other, file], {"limit": 5})
    with pytest.raises(UsageError) as caught:
        refuse_differences(old, new)
    for key in (
        "model.depth",
        "task.pmi",
        "inputs.0.sha256",
        "inputs.1.sha256",
        "inputs.count",
        "read.limit",
    ):
        assert key in str(caught.value)
    assert "model.digest" not in str(caught.value)
