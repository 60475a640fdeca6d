"""A file that holds segments says them whole, whenever the process that wrote it ended."""

import os
import shutil
import subprocess
import sys
import time
import warnings

import pytest

from tf_adaptive_dp import ReleaseLog
from tf_adaptive_dp.accounting.ledger import Ledger
from tf_adaptive_dp.accounting.releases import Segment
from tf_adaptive_dp.durable import ledger_file as files
from tf_adaptive_dp.durable.files import Clock
from tf_adaptive_dp.durable.ledger_file import SegmentFile

RECORD = 8192
ONE, TWO, THREE = ([Segment(1.1, 8.0, n)] for n in (1, 2, 3))


def opened(path):
    """What the file at a path says, as a later process reads it."""
    file = SegmentFile(path, fsync=False)
    file.close()
    return file.segments


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_says_what_was_written_last(tmp_path, fsync, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    path = tmp_path / "new" / "folder" / "log"
    file = SegmentFile(path, fsync=fsync)
    assert file.segments == [] and len(synced) == 2 * fsync  # the folder as well
    synced.clear()
    file.write(THREE, None)
    assert synced == [file._file] * fsync
    many = [Segment(1 / 3 + k, 1e300 / 7, 2**62 + k) for k in range(Ledger.MAX_SEGMENTS)]
    for segments, fewest in ((ONE, 7), (many, 2**62), (TWO, None), ([], 3), ([*ONE, *TWO], 2)):
        file.write(segments, fewest)
        file.close()
        file = SegmentFile(path, fsync=fsync)
        assert (file.segments, file.fewest_units) == (segments, fewest)
    file.write(ONE, None, adopted=True)
    file.close()
    file = SegmentFile(path, fsync=fsync)
    assert file.adopted
    file.write([*ONE, *TWO], None)
    assert not file.adopted
    content = path.read_text()
    assert len(content) == 2 * RECORD and content.count("\n") == 2 and "[1.1, 8.0, 2]" in content


def states_of_a_file(path):
    """The content after each of four writes, beginning with its creation."""
    file = SegmentFile(path, fsync=False)
    states = [path.read_bytes()]
    for segments in (ONE, TWO, THREE):
        file.write(segments, None)
        states.append(path.read_bytes())
    file.close()
    return states


@pytest.mark.parametrize("part", [0, 1, 40, 512, 4096, RECORD - 1, RECORD])
@pytest.mark.parametrize("lost", ["old", "zero"])
def test_a_record_that_was_not_finished_counts_as_not_begun(tmp_path, part, lost):
    path = tmp_path / "log"
    states = states_of_a_file(path)
    for number, wanted in enumerate([[], ONE, TWO, THREE]):
        slot = number % 2 * RECORD
        before = states[number - 1] if number else b""
        new = states[number][slot : slot + RECORD]
        torn = new[:part]
        if lost == "zero" or number < 2:
            torn += bytes(RECORD - part)
        else:
            torn += before[slot + part : slot + RECORD]
        path.write_bytes(before[:slot] + torn + before[slot + RECORD :])
        earlier = [[], [], ONE, TWO][number]
        # The last bytes of a record are the same in both slots if only spaces are missing.
        assert opened(path) == (wanted if torn == new else earlier)


@pytest.mark.parametrize(
    "damage",
    {
        "another text": lambda s: b"epoch,loss\n1,0.5\n",
        "zeros and more": lambda s: bytes(RECORD) + b"x",
        "both records damaged": lambda s: s[3][:50] + b"?" + s[3][51:-50] + b"?" + s[3][-49:],
        "cut off": lambda s: s[2][:RECORD],
        "cut off in the middle": lambda s: s[2][: RECORD + 100],
        "too long": lambda s: s[3] + b"\n",
        "records of different files": lambda s: s[3][:RECORD] + s[0],
        "records exchanged": lambda s: s[3][RECORD:] + s[3][:RECORD],
        "too many segments": lambda s: (
            files._Record(0, [], 1, None).encoded()
            + files._Record(1, [(1.0 + k, 1.0, 1) for k in range(65)], 1, None).encoded()
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_any_other_damage_is_an_error_and_changes_nothing(tmp_path, damage):
    path = tmp_path / "log"
    content = damage[1](states_of_a_file(path))
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a release log, or it is damaged.*path="):
        ReleaseLog(path)
    assert path.read_bytes() == content


def test_two_processes_cannot_write_to_one_log(tmp_path):
    path = tmp_path / "log"
    log = ReleaseLog(path)
    with pytest.raises(RuntimeError, match="in use by another process, or by another ReleaseLog"):
        ReleaseLog(path)
    log.close()
    ReleaseLog(path).close()
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(); input()"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        with pytest.raises(RuntimeError, match="in use by another process"):
            ReleaseLog(path)
        other.kill()  # which frees the log
    ReleaseLog(path).close()


def test_a_log_that_was_closed_writes_to_no_other_file(tmp_path):
    file = SegmentFile(tmp_path / "log", fsync=False)
    file.close()
    with open(tmp_path / "other", "wb"), pytest.raises(OSError, match="Bad file descriptor"):
        file.write(ONE, None)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_copy_is_told_from_a_moved_file(tmp_path):
    path, copy, moved = (tmp_path / name for name in ("log", "copy", "moved"))
    file = SegmentFile(path, fsync=False)
    file.write(ONE, None)
    file.close()
    shutil.copy(path, copy)
    path.rename(moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(moved) == ONE
    for segments in (ONE, TWO, THREE):  # not only the first time, and after it was written again
        with pytest.warns(UserWarning, match="^The release log is a copy.*ε is too small"):
            file = SegmentFile(copy, fsync=False)
        assert file.segments == segments
        file.write([Segment(1.1, 8.0, segments[0].num_releases + 1)], None)
        file.close()


def test_a_copy_that_takes_the_place_of_a_deleted_file_is_noticed(tmp_path):
    # Most file systems give it the inode of the file that was deleted.
    path, older = tmp_path / "log", tmp_path / "older"
    SegmentFile(path, fsync=False).close()
    shutil.copy(path, older)
    file = SegmentFile(path, fsync=False)
    file.write(ONE, None)
    file.close()
    path.unlink()
    shutil.copy(older, path)
    with pytest.warns(UserWarning, match="was restored from one"):
        assert opened(path) == []


LATER = 10 * 10**9  # ten seconds


@pytest.mark.parametrize("older", [0, 1, 2])
def test_an_older_copy_that_is_written_into_the_file_is_noticed(tmp_path, monkeypatch, older):
    path = tmp_path / "log"
    with monkeypatch.context() as earlier:
        earlier.setattr(Clock, "now", lambda clock: time.time_ns() - LATER)
        states = states_of_a_file(path)
    path.write_bytes(states[older])
    with pytest.warns(UserWarning, match="changed after it was last written.*ε is too small"):
        file = SegmentFile(path, fsync=False)
    assert file.segments == [[], ONE, TWO][older]
    file.write(THREE, None)
    file.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(path) == THREE


def test_a_record_that_was_not_finished_is_no_copy(tmp_path, monkeypatch):
    path = tmp_path / "log"
    with monkeypatch.context() as earlier:
        earlier.setattr(Clock, "now", lambda clock: time.time_ns() - LATER)
        states = states_of_a_file(path)
    for number in (1, 2):
        slot = number % 2 * RECORD
        torn = states[number][slot : slot + 40].ljust(RECORD, b"\0")
        path.write_bytes(states[number - 1][:slot] + torn + states[number - 1][slot + RECORD :])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert opened(path) == [[], ONE][number - 1]


def test_a_file_system_whose_clock_is_ahead_makes_no_copies(tmp_path, monkeypatch):
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - LATER)
    file = SegmentFile(tmp_path / "log", fsync=False)
    file.write(ONE, None)
    file.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(tmp_path / "log") == ONE


def test_a_file_without_an_identity_and_a_number_of_units_gets_them(tmp_path, monkeypatch):
    path = tmp_path / "log"
    with monkeypatch.context() as older:
        whole = files.json.dumps
        older.setattr(
            files.json,
            "dumps",
            lambda content: whole(dict(list(content.items())[:3])),
        )
        file = SegmentFile(path, fsync=False)
        file.write(ONE, None)
        file.close()
    assert "identity" not in path.read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = SegmentFile(path, fsync=False)
    assert file.fewest_units is None
    file.write(TWO, 5)
    file.close()
    shutil.copy(path, tmp_path / "copy")
    with pytest.warns(UserWarning, match="is a copy"):
        assert opened(tmp_path / "copy") == TWO
