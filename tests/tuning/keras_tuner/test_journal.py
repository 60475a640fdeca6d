"""The journal of a search: whole at every moment, or refused."""

import os
import re
import shutil
import time
import warnings

import pytest

from tf_adaptive_dp.durable.files import Clock
from tf_adaptive_dp.tuning.keras_tuner import search_journal as journals
from tf_adaptive_dp.tuning.keras_tuner.search_journal import SearchJournal

SEARCH, PLAN = {"epsilon": 1.0}, {"draws": [{"a": 1}, {"a": 2}], "noise_multiplier": 1.5}
OUTCOME = {"score": 0.5}


def written(path):
    journal = SearchJournal(path)
    journal.begin(SEARCH, PLAN)
    journal.note_begun()
    journal.note_ended(OUTCOME)
    journal.note_begun()
    journal.close()
    return path.read_bytes()


def read(path):
    journal = SearchJournal(path)
    journal.close()
    return journal.search, journal._drawn, journal.begun, journal.ended


def without_times(content):
    return re.sub(rb'"written": \d+} \w{8}', b"", content)


def test_what_was_noted_is_there_when_it_is_opened_again(tmp_path):
    written(tmp_path / "journal")
    assert read(tmp_path / "journal") == (SEARCH, PLAN, 2, [OUTCOME])
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_torn_at_any_byte_it_is_what_was_noted_before(tmp_path):
    path = tmp_path / "journal"
    content = written(path)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        search, _, begun, ended = read(path)
        assert (search is not None, begun, len(ended)) == (
            whole > 0,
            (whole > 1) + (whole > 3),
            int(whole > 2),
        )


@pytest.mark.parametrize("left", [b"", b"longer than the entry that takes its place" * 9])
def test_after_a_torn_entry_it_goes_on(tmp_path, left):
    path = tmp_path / "journal"
    content = written(path)
    path.write_bytes(content[:-5] + left)
    journal = SearchJournal(path)
    journal.note_begun()
    journal.close()
    assert without_times(path.read_bytes()) == without_times(content)


@pytest.mark.parametrize("position", [3, 40, -20])
def test_damage_is_refused_and_left_as_it_was(tmp_path, position):
    path = tmp_path / "journal"
    content = bytearray(written(path))
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        SearchJournal(path)
    assert path.read_bytes() == content


def test_another_file_is_refused(tmp_path):
    (tmp_path / "journal").write_text("something else")
    with pytest.raises(ValueError, match="not the journal of a search"):
        SearchJournal(tmp_path / "journal")
    assert (tmp_path / "journal").read_text() == "something else"


def test_entries_come_in_order_only(tmp_path):
    journal = SearchJournal(tmp_path / "journal")
    with pytest.raises(ValueError, match="may not be written now"):
        journal.note_begun()
    journal.close()
    written(tmp_path / "other")
    journal = SearchJournal(tmp_path / "other")
    with pytest.raises(ValueError, match="may not be written now"):
        journal.note_begun()  # the second trial is in progress
    for of_the_first in ({"resumed": 1}, {"ended": 1, "outcome": OUTCOME}):
        with pytest.raises(ValueError, match="may not be written now"):
            journal._append(of_the_first)
    journal.note_ended(OUTCOME)
    journal.close()
    assert read(tmp_path / "journal") == (None, None, 0, [])
    assert read(tmp_path / "other") == (SEARCH, PLAN, 2, [OUTCOME, OUTCOME])


@pytest.mark.parametrize(
    "lines, wrong",
    [([0, 2, 1], 2), ([0, 1, 1], 3), ([0, 1, 3], 3), ([0, 1, 2, 2], 4), ([1], 1)],
)
def test_a_file_whose_entries_are_out_of_place_is_refused(tmp_path, lines, wrong):
    path = tmp_path / "journal"
    content = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join(content[line] for line in lines))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"damaged.*Nothing was changed.*line {wrong}$"):
        SearchJournal(path)
    assert path.read_bytes() == before


def test_it_counts_how_often_a_trial_was_resumed(tmp_path):
    written(tmp_path / "journal")
    journal = SearchJournal(tmp_path / "journal")
    journal.note_resumed()
    journal.note_resumed()
    journal.close()
    journal = SearchJournal(tmp_path / "journal")
    assert journal.resumed == 2
    journal.note_ended(OUTCOME)
    with pytest.raises(ValueError, match="may not be written now"):
        journal.note_resumed()


def test_no_trial_begins_beyond_the_draws(tmp_path):
    journal = SearchJournal(tmp_path / "journal")
    journal.begin(SEARCH, {"draws": []})
    with pytest.raises(ValueError, match="may not be written now"):
        journal.note_begun()
    assert journal.begun == 0


def test_one_process_at_a_time(tmp_path):
    journal = SearchJournal(tmp_path / "journal")
    with pytest.raises(RuntimeError, match="in progress"):
        SearchJournal(tmp_path / "journal")
    journal.close()
    SearchJournal(tmp_path / "journal").close()


def test_entries_are_on_the_disk_before_a_method_returns(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    journal = SearchJournal(tmp_path / "journal")
    journal.begin(SEARCH, PLAN)
    assert journal._file in synced and len(synced) > 1  # the folder as well
    for note in (journal.note_begun, lambda: journal.note_ended(OUTCOME)):
        synced.clear()
        note()
        assert synced == [journal._file]


def test_differences_are_named():
    with pytest.raises(ValueError, match="Changed: epsilon: was 1.0, is 2.0. Received: here"):
        journals.compare({"epsilon": 1.0, "same": [1]}, {"epsilon": 2.0, "same": (1,)}, "here")
    journals.compare({"same": [1]}, {"same": (1,)}, "here")


def test_a_copy_is_told_from_a_moved_file(tmp_path):
    written(tmp_path / "first")
    shutil.copy(tmp_path / "first", tmp_path / "copy")
    (tmp_path / "first").rename(tmp_path / "moved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / "moved") == (SEARCH, PLAN, 2, [OUTCOME])
    for _ in range(2):  # not only the first time
        with pytest.warns(UserWarning, match="^The search's folder is a copy.*ε is too small"):
            assert read(tmp_path / "copy") == (SEARCH, PLAN, 2, [OUTCOME])


@pytest.mark.parametrize("torn", [False, True])
def test_an_older_copy_that_is_written_into_the_file_is_noticed(tmp_path, monkeypatch, torn):
    path = tmp_path / "journal"
    with monkeypatch.context() as earlier:
        earlier.setattr(Clock, "now", lambda clock: time.time_ns() - 10 * 10**9)
        written(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    if torn:  # by a kill: the file was changed after its last line, but by its own process
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:5])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(path)
        return
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.warns(UserWarning, match="changed after it was last written.*ε is too small"):
        read(path)
