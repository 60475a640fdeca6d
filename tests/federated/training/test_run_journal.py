"""What a journal of rounds keeps, and what it refuses."""

import os

import pytest

from federated.training.run_journal import RunJournal
from tf_adaptive_dp.durable.files import Clock

RUN = {"noise": 1.5, "state": ["a", "b"]}


def opened(path, run=RUN):
    journal = RunJournal(path, run)
    journal.close()
    return journal


@pytest.fixture(autouse=True)
def one_time(monkeypatch):
    """All lines say the same time, so that one that is written again is the same."""
    monkeypatch.setattr(Clock, "now", lambda clock: 2**62)


@pytest.fixture
def path(tmp_path):
    journal = RunJournal(tmp_path / "journal", RUN)
    for entry in [("begun", 1), ("begun", 2), ("released", 2), ("begun", 3)]:
        journal.note(*entry)
    journal.close()
    return tmp_path / "journal"


def test_entries_are_there_again(path):
    journal = RunJournal(path, RUN)
    assert (journal.begun, journal.released) == (3, 2)
    journal.note("released", 3)
    journal.close()
    assert opened(path).released == 3


def test_a_line_that_was_not_finished_is_as_if_it_had_not_begun(path):
    content = path.read_bytes()
    *before, last = content.splitlines(keepends=True)
    for length in range(len(last)):
        path.write_bytes(b"".join(before) + last[:length])
        assert opened(path).begun == 2
        # After a power failure the end may be zeros.
        path.write_bytes(b"".join(before) + last[:length] + b"\0" * 50)
        journal = RunJournal(path, RUN)
        journal.note("begun", 3)
        journal.close()
        assert path.read_bytes() == content


def test_a_first_line_that_was_not_finished_is_written_anew(path):
    first = path.read_bytes().splitlines(keepends=True)[0]
    for length in range(len(first)):
        path.write_bytes(first[:length])
        assert opened(path).begun == 0
        assert path.read_bytes() == first


def test_damage_is_an_error_and_nothing_is_changed(path):
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 3):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a journal, or it is damaged.*line [1-5]"):
            opened(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("missing", [1, 2])
def test_a_line_that_is_missing_is_an_error(path, missing):
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[missing]
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="it is damaged"):
        opened(path)


@pytest.mark.parametrize("content", [b"epsilon,delta\n1,2\n", b"notes", b"{}\n"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a journal"):
        opened(path)
    assert path.read_bytes() == content


def test_another_run_is_refused(path):
    with pytest.raises(ValueError, match="more: was None, is 2; noise: was 1.5, is 1.0"):
        opened(path, {"noise": 1.0, "state": ["a", "b"], "more": 2})


def test_a_run_whose_states_have_another_form_is_refused_by_its_leaves(path):
    content = path.read_bytes()
    other = RUN | {"state": ["a", "c"]}
    message = r"an earlier version .*, which has \['b'\] in place of \['c'\]"
    with pytest.raises(ValueError, match=message):
        opened(path, other)
    with pytest.raises(ValueError, match="other arguments.*noise: was 1.5, is 2.0; state: was"):
        opened(path, other | {"noise": 2.0})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "entry",
    [
        ("begun", 5),
        ("begun", 3),
        ("drawn_by_caller", 3),
        ("released", 1),
        ("released", 4),
        ("redrawn", 2),
        ("contradicted", 2),
    ],
)
def test_an_impossible_entry_is_refused(path, entry):
    content = path.read_bytes()
    journal = RunJournal(path, RUN)
    with pytest.raises(ValueError, match=f"Round {entry[1]} cannot be {entry[0]} now.*begun=3"):
        journal.note(*entry)
    journal.close()
    assert path.read_bytes() == content


def test_a_run_keeps_the_first_key_that_was_noted(path):
    journal = RunJournal(path, RUN)
    journal.note_sampler_key("first")
    with pytest.raises(ValueError, match="may not be written now.*second"):
        journal.note_sampler_key("second")
    journal.close()
    assert opened(path).sampler_key == "first"


def test_what_cannot_be_written_was_not_noted(path, monkeypatch):
    content, pwrite = path.read_bytes(), os.pwrite
    journal = RunJournal(path, RUN)
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", lambda file, line, place: pwrite(file, line[:7], place))
        with pytest.raises(OSError, match="Only 7 of"):
            journal.note("begun", 4)
    assert journal.begun == 3
    journal.note("begun", 4)
    journal.close()
    assert path.read_bytes().startswith(content)
    assert opened(path).begun == 4


def test_a_journal_is_open_once(path):
    first = RunJournal(path, RUN)
    with pytest.raises(RuntimeError, match="in progress in another process"):
        RunJournal(path, RUN)
    first.close()
    opened(path)
