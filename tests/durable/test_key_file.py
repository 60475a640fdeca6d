"""The keys of a run's noise: kept until the run ends, and each process adds one of its own."""

import json

import pytest

from tf_adaptive_dp.durable import files
from tf_adaptive_dp.durable.key_file import KeyFile


def test_each_process_adds_a_key_of_its_own_and_keeps_the_others(tmp_path):
    path = tmp_path / "noise.key"
    opened = [KeyFile(path, num_releases) for num_releases in (0, 3, 3)]
    firsts, keys = zip(*opened[-1].keys)
    assert firsts == (0, 3, 3) and len(set(keys)) == 3
    assert [file.keys for file in opened] == [opened[-1].keys[:k] for k in (1, 2, 3)]
    assert {file.groups for file in opened} == {opened[0].groups}
    assert path.stat().st_mode & 0o777 == 0o600
    opened[-1].delete()
    assert not path.exists()


def test_copies_of_a_run_draw_no_noise_twice(tmp_path):
    begun = KeyFile(tmp_path / "noise.key", 0)
    (tmp_path / "copy.key").write_bytes((tmp_path / "noise.key").read_bytes())
    one, other = (KeyFile(tmp_path / name, 2) for name in ("noise.key", "copy.key"))
    assert one.keys[0] == other.keys[0] == begun.keys[0]
    assert one.keys[1] != other.keys[1]


@pytest.mark.parametrize("damage", [lambda text: text[:-2], lambda text: text.replace(b"0", b"1")])
def test_a_damaged_file_is_refused_and_left_as_it_was(tmp_path, damage):
    path = tmp_path / "noise.key"
    content = {"noise_keys": [[0, 10]], "groups": bytes(32).hex()}
    path.write_bytes(damage(files.with_checksum(json.dumps(content).encode())))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="keys of the run's noise are damaged"):
        KeyFile(path, 2)
    assert path.read_bytes() == before


def test_a_run_that_has_released_needs_its_keys(tmp_path):
    with pytest.raises(ValueError, match="keys of this run's noise are missing.*after 2 releases"):
        KeyFile(tmp_path / "noise.key", 2)
    assert not (tmp_path / "noise.key").exists()
