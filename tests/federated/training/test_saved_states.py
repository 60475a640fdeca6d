"""Saved states: each is as it was saved or refused, and only what changed is written again."""

import numpy as np
import pytest
import tensorflow as tf

from federated.training.saved_states import SavedStates

STATE = {
    "weights": np.linspace(0, 1, 2000, dtype=np.float32).reshape(2, 1000),
    "text": "a\0",
    "n": 3,
    "half": tf.constant([1.5, -2.0], tf.bfloat16).numpy(),
    "nothing": (np.zeros([0, 2], np.float64), ()),
    "flag": np.True_,
}
RECORD = {"finished": 1, "ledger": [0.1, None], "figures": {"loss": float("nan")}}


def assert_loaded(state, record):
    assert repr(record) == repr(RECORD)
    assert (state["text"], state["n"], state["flag"]) == (b"a\0", 3, True)
    for name in ("weights", "half"):
        np.testing.assert_array_equal(state[name], STATE[name])
        assert state[name].dtype == STATE[name].dtype and state[name].flags.writeable
    assert state["nothing"][0].shape == (0, 2) and state["nothing"][1] == ()


def test_a_state_is_as_it_was_saved_or_refused(tmp_path):
    saved = SavedStates(tmp_path)
    saved.save(1, STATE, RECORD)
    path = tmp_path / "round_1.state"
    assert path.stat().st_mode & 0o777 == 0o600
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in [0, 1, len(content) - 1, *rng.integers(len(content), size=50)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match="saved state cannot be read"):
            saved.load(1, STATE)
    path.write_bytes(content)
    assert_loaded(*saved.load(1, STATE))
    with pytest.raises(ValueError, match="saved state cannot be read"):
        saved.load(1, STATE | {"z": 1})
    with pytest.raises(TypeError, match="numbers, texts, and arrays of numbers"):
        saved.save(2, {"what": object()}, RECORD)
    assert saved.latest() == 1


def test_a_state_under_the_name_of_another_one_is_refused(tmp_path):
    saved = SavedStates(tmp_path)
    saved.save(4, STATE, RECORD)
    content = (tmp_path / "round_4.state").read_bytes()
    (tmp_path / "round_5.state").write_bytes(content)
    assert saved.latest() == 5
    with pytest.raises(ValueError, match="renamed.*round_5.state'; it is the state of round 4"):
        saved.load(5, STATE)
    assert_loaded(*saved.load(4, STATE))


def test_the_two_newest_states_are_kept_and_unfinished_ones_removed(tmp_path):
    saved = SavedStates(tmp_path)
    for number in (1, 2, 4):
        saved.save(number, STATE, RECORD)
    (tmp_path / "round_5.new").write_bytes(b"unfinished")
    assert SavedStates(tmp_path).latest() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round_2.state", "round_4.state"]


def arrays(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.array")}


def test_a_large_array_is_written_again_only_if_it_changed(tmp_path):
    saved = SavedStates(tmp_path)
    # As TFF returns it: its memory belongs to `bytes`, so nobody can change it.
    noise = np.frombuffer(np.arange(2.0**18).tobytes())
    weights = np.ones(2**18, np.float32)
    state = {"noise": noise, "weights": weights, "n": 3}
    saved.save(1, state, RECORD)
    first = arrays(tmp_path)
    assert len(first) == 2 and all(len(name) == 38 for name in first)
    assert (tmp_path / "round_1.state").stat().st_size < 1000
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("*.array"))
    weights[5] = 2.0  # in place: the same object, another content
    for folder in (saved, SavedStates(tmp_path)):  # also by a process that has just begun
        folder.save(2, state, RECORD)
        assert len(arrays(tmp_path)) == 3 and first.items() <= arrays(tmp_path).items()
    np.testing.assert_array_equal(saved.load(1, state)[0]["weights"], 1.0)
    loaded = saved.load(2, state)[0]
    assert loaded["weights"][5] == 2.0 and loaded["n"] == 3
    np.testing.assert_array_equal(loaded["noise"], noise)
    saved.save(3, state | {"noise": noise + 1}, RECORD)
    saved.save(4, state | {"noise": noise + 1}, RECORD)
    assert len(arrays(tmp_path)) == 2  # that of rounds 1 and 2 is gone
    np.testing.assert_array_equal(saved.load(4, state)[0]["noise"], noise + 1)


@pytest.mark.parametrize("is_view", [True, False])
def test_an_array_that_cannot_be_written_may_still_change(tmp_path, is_view):
    saved, base = SavedStates(tmp_path), np.zeros(2**18)
    noise = base[:] if is_view else base
    noise.setflags(write=False)
    saved.save(1, {"noise": noise}, RECORD)
    base.setflags(write=True)
    base[7] = 1.0
    base.setflags(write=False)
    saved.save(2, {"noise": noise}, RECORD)
    found = [saved.load(number, {"noise": noise})[0]["noise"][7] for number in (1, 2)]
    assert found == [0.0, 1.0]


def test_a_state_without_one_of_its_arrays_is_refused(tmp_path):
    saved = SavedStates(tmp_path)
    state = {"noise": np.arange(2.0**18)}
    saved.save(1, state, RECORD)
    (path,) = tmp_path.glob("*.array")
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="saved state cannot be read"):
        saved.load(1, state)
    path.unlink()
    with pytest.raises(ValueError, match="saved state cannot be read"):
        saved.load(1, state)


def test_the_arrays_of_a_damaged_state_are_kept(tmp_path):
    saved = SavedStates(tmp_path)
    state = {"noise": np.arange(2.0**18)}
    saved.save(1, state, RECORD)
    path = tmp_path / "round_1.state"
    content = path.read_bytes()
    path.write_bytes(b"?" + content[1:])
    saved.save(2, {"noise": state["noise"] + 1}, RECORD)
    path.write_bytes(content)
    np.testing.assert_array_equal(saved.load(1, state)[0]["noise"], state["noise"])
