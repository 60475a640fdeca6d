"""Data whose last batch is smaller train with the size of full batches, or are refused at once."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION


def model(**kwargs):
    made = catalogue.mlp()
    made.compile(dp.DPSGD(1.0, 1.0, **kwargs), loss=catalogue.loss())
    return made


def fit(made, num_examples, **kwargs):
    x, y = catalogue.data(num_examples)
    made.fit(x, y, **{"batch_size": 8, "verbose": 0, **kwargs})
    return made.optimizer.ledger.num_releases


def test_the_batch_size_of_fit_becomes_the_expected_one():
    given, found = model(expected_batch_size=8, seed=3), model(seed=3)
    found.set_weights(given.get_weights())
    for made in (given, found):
        assert fit(made, 20, shuffle=False) == 3
        assert made.optimizer.ledger.segments == [(1.0, 8.0, 3)]
    assert found.optimizer.expected_batch_size == 8.0
    for with_size, without in zip(given.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_array_equal(with_size, without)


@pytest.mark.slow_on(2)
def test_the_parts_of_a_batch_make_the_expected_size_together():
    made = model(gradient_accumulation_steps=2)
    assert fit(made, 28) == 2  # 8 + 8, 8 + 4
    assert made.optimizer.ledger.segments == [(1.0, 16.0, 2)]


@pytest.mark.parametrize(
    "kwargs, cure",
    [
        ({"num_microbatches": 2, "expected_batch_size": 8}, "without `num_microbatches`"),
        ({"num_microbatches": 2}, "without `num_microbatches`.*expected_batch_size=None"),
        ({"examples_per_user": 2}, "Pass `expected_batch_size` to the optimizer, or"),
    ],
)
def test_it_is_refused_before_anything_is_released(kwargs, cure):
    made = model(**kwargs)
    before = made.get_weights()
    with pytest.raises(ValueError, match=f"batches of 8 examples, and a last one of 4.*{cure}"):
        fit(made, 20)
    assert made.optimizer.ledger.num_releases == 0
    for old, new in zip(before, made.get_weights()):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow_on(3)
def test_batches_of_one_size_and_batches_that_may_vary_train():
    made = model()
    assert fit(made, 16) == 2
    assert fit(made, 16, steps_per_epoch=1) == 3
    assert fit(model(), 5) == 1  # one batch, smaller than asked for
    assert fit(model(expected_batch_size=8), 20) == 3


@pytest.mark.slow_on(2)
def test_a_later_fit_goes_on_with_batches_of_the_same_size_only():
    made = model()
    assert fit(made, 16) == 2
    assert fit(made, 20) == 5
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 5)]
    made = model()
    assert fit(made, 16) == 2
    with pytest.raises(ValueError, match="batches of 6 examples, and a last one of 2"):
        fit(made, 20, batch_size=6)
    assert made.optimizer.ledger.num_releases == 2


def _copied(made, folder):
    copy = catalogue.mlp()
    copy.set_weights(made.get_weights())
    old = made.optimizer
    copy.compile(type(old).from_config(old.get_config()), loss=catalogue.loss())
    return copy


def _loaded(made, folder):
    made.save(folder / "model.keras")
    return tf.keras.models.load_model(folder / "model.keras")


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("successor", [_copied, _loaded])
def test_a_size_that_fit_found_is_none_that_was_declared_to_a_copy(successor, tmp_path):
    """Batches of 12 counted as Poisson batches of 8 then, since 12 may be such a draw."""
    made = model()
    assert fit(made, 20) == 3
    same, larger = successor(made, tmp_path), successor(made, tmp_path)
    assert fit(same, 20) == 6
    assert same.optimizer.ledger.segments == [(1.0, 8.0, 6)]
    if successor is _copied:
        assert fit(larger, 20, batch_size=12) == 5
        assert larger.optimizer.ledger.segments == [(1.0, 8.0, 3), (1.0, 12.0, 2)]
    else:
        with pytest.raises(ValueError, match="batches of 12 examples, and a last one of 8"):
            fit(larger, 20, batch_size=12)
    given = model(expected_batch_size=8)
    fit(given, 20)
    assert successor(given, tmp_path).optimizer.expected_batch_size == 8.0


@pytest.mark.in_turns
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loaded_model_goes_on_whichever_batch_came_first(shuffle, tmp_path):
    made = model()
    made.fit(Batches(8, batch_size=8), epochs=3, shuffle=shuffle, verbose=0)
    loaded = _loaded(made, tmp_path)
    loaded.fit(Batches(8, batch_size=8), epochs=3, shuffle=shuffle, verbose=0)
    assert loaded.optimizer.ledger.segments == [(1.0, 8.0, 18)]


def examples(num_examples=20):
    return tf.data.Dataset.from_tensor_slices(catalogue.data(num_examples))


def doubled(x, y):
    """Copies rows in Python, where the search of `map` does not see it."""
    x, y = tf.numpy_function(lambda *b: [np.repeat(p, 2, 0) for p in b], [x, y], [x.dtype, y.dtype])
    return tf.ensure_shape(x, [None, 6]), tf.ensure_shape(y, [None])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "batches",
    [
        lambda data: data.batch(8),
        lambda data: data.padded_batch(8),
        lambda data: data.shuffle(20).batch(8, num_parallel_calls=2).prefetch(2),
        lambda data: data.batch(8).map(lambda x, y: (x, y)).cache().with_options(tf.data.Options()),
        lambda data: data.concatenate(examples(8)).batch(8).skip(1).prefetch(2),
        lambda data: data.batch(8).take(3),
    ],
)
def test_full_batches_of_a_data_set_have_the_expected_size(batches, recwarn):
    made = model()
    made.fit(batches(examples()), epochs=2, verbose=0)
    assert not [w for w in recwarn if "tf.data options" in str(w.message)]
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 6)]
    assert made.optimizer.expected_batch_size == 8.0


def generated(num_examples=20):
    def each():
        yield from zip(*catalogue.data(num_examples))

    return tf.data.Dataset.from_generator(each, output_signature=examples().element_spec)


@pytest.mark.in_turns
@pytest.mark.parametrize("data", [lambda: examples().filter(lambda x, y: True), generated])
def test_full_batches_of_a_data_set_of_unknown_size_have_the_expected_size(data):
    made = model()
    made.fit(data().shuffle(20).batch(8).prefetch(2), epochs=2, verbose=0)
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 6)]
    assert made.optimizer.expected_batch_size == 8.0


class Batches(tf.keras.utils.Sequence):  # `PyDataset`, of which this is a name in Keras 3
    def __init__(self, size, **attributes):
        super().__init__()
        self.size, self.data, self.read = size, catalogue.data(20), []
        vars(self).update(attributes)

    def __len__(self):
        return -(-20 // self.size)

    def __getitem__(self, index):
        self.read.append(index)
        return tuple(part[index * self.size : (index + 1) * self.size] for part in self.data)


@pytest.mark.in_turns
@pytest.mark.parametrize("shuffle", [False, True])  # then the smaller batch may be the first
def test_batches_of_a_py_dataset_have_the_size_that_it_says(shuffle):
    made = model()
    made.fit(Batches(8, batch_size=8), epochs=4, shuffle=shuffle, verbose=0)
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 12)]
    assert made.optimizer.expected_batch_size == 8.0


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_py_dataset_that_says_no_size_is_refused_before_anything_is_released(kwargs, shuffle):
    made = model(**kwargs)
    with pytest.raises(ValueError, match="batches of 8 examples, and a last one of 4") as error:
        made.fit(Batches(8), shuffle=shuffle, verbose=0)
    assert ("`PyDataset` an attribute `batch_size`" in str(error.value)) is (not kwargs)
    assert made.optimizer.ledger.num_releases == 0
    made = model(expected_batch_size=8)
    made.fit(Batches(8), shuffle=shuffle, verbose=0)
    assert made.optimizer.ledger.num_releases == 3


def test_a_py_dataset_of_equal_batches_or_of_steps_trains():
    made = model()
    made.fit(Batches(5), verbose=0)
    made.fit(Batches(5, batch_size=None), steps_per_epoch=2, verbose=0)
    assert made.optimizer.ledger.segments == [(1.0, 5.0, 6)]
    made = model()
    made.fit(Batches(8), steps_per_epoch=2, shuffle=False, verbose=0)
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 2)]


@pytest.mark.filterwarnings("ignore:Under eager execution")
@pytest.mark.skipif(GENERATION == 3, reason="Keras 3 cannot train eagerly")
def test_the_last_batch_of_a_py_dataset_is_looked_at_once_in_an_eager_fit():
    made, batches = model(), Batches(5)
    made.run_eagerly = True
    made.fit(batches, epochs=2, shuffle=False, verbose=0)
    assert batches.read.count(3) == 2 + 1


def test_batches_of_a_py_dataset_that_says_a_smaller_size_are_refused():
    made = model()
    with pytest.raises(tf.errors.InvalidArgumentError, match="a batch of.* .8. .after batches"):
        made.fit(Batches(8, batch_size=4), shuffle=False, verbose=0)
    assert made.optimizer.ledger.num_releases == 0


def test_the_error_of_a_step_names_the_line_of_fit_and_no_other():
    made = model()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Batches vary in size") as error:
        parts = [np.split(part, [8, 16]) for part in catalogue.data(20)]
        made.fit((batch for batch in zip(*parts)), verbose=0)
    assert made.optimizer.ledger.num_releases == 2
    files = re.findall(r'File "(.*)", line', error.value.message)
    assert files == [__file__]


def test_a_data_set_of_unknown_size_may_have_no_smaller_batch():
    made = model(num_microbatches=2)
    made.fit(generated(16).batch(8), verbose=0)
    assert made.optimizer.ledger.num_releases == 2
    made = model()
    made.fit(generated().batch(8, drop_remainder=True), verbose=0)
    assert made.optimizer.expected_batch_size is None


def test_a_data_set_that_repeats_goes_on_after_its_smaller_batch():
    made = model()
    made.fit(examples().batch(8).repeat(), steps_per_epoch=4, verbose=0)
    assert made.optimizer.ledger.segments == [(1.0, 8.0, 4)]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "batches, kwargs",
    [
        (lambda data: data.batch(8, drop_remainder=True), {}),
        (lambda data: data.repeat().batch(5), {"steps_per_epoch": 4}),
        (lambda data: data.batch(8), {"steps_per_epoch": 2}),
        (lambda data: data.batch(10), {}),
        (lambda data: data.batch(8).take(2).repeat(2), {}),
        (lambda data: data.batch(8).skip(1), {"steps_per_epoch": 1}),
    ],
)
def test_a_data_set_without_a_smaller_batch_sets_no_size(batches, kwargs):
    made = model()
    made.fit(batches(examples()), verbose=0, **kwargs)
    assert made.optimizer.expected_batch_size is None


def test_a_data_set_is_refused_before_anything_is_released():
    made = model(num_microbatches=2)
    with pytest.raises(ValueError, match="batches of 8 examples, and a last one of 4"):
        made.fit(examples().batch(8), verbose=0)
    assert made.optimizer.ledger.num_releases == 0


def test_batches_that_a_map_makes_larger_are_refused():
    made = model()
    received = r"a batch of\] \[16\] \[after batches of\] \[8\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=received):
        made.fit(examples().batch(8).map(doubled), verbose=0)
    assert made.optimizer.ledger.num_releases == 0


@pytest.mark.slow_on(2)
def test_batches_that_a_map_makes_larger_count_with_their_size_under_xla():
    made = model()
    made.compile(made.optimizer, loss=made.loss, jit_compile=True)
    made.fit(examples().batch(8).map(doubled), verbose=0)
    ((_, size, releases),) = made.optimizer.ledger.segments
    with pytest.warns(UserWarning, match="16"):
        spent = dp.epsilon_spent(made.optimizer, num_examples=100, delta=1e-3)
    declared = dp.DPSGD(1.0, 1.0, expected_batch_size=16)
    declared.ledger.restore([(1.0, 16.0, releases)], [])
    assert spent >= dp.epsilon_spent(declared, num_examples=100, delta=1e-3)
