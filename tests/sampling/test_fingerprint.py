"""A digest of examples notices that they changed, or came in another order."""

import numpy as np

from tests.helpers.killable_plan import Pairs
from tf_adaptive_dp.sampling.sources import MOST_COMPARED, fingerprint, open_source

SALT = bytes(range(16))


def digest(*data, salt=SALT):
    return fingerprint(open_source(data if len(data) > 1 else data[0], None), salt)


def test_every_change_of_a_few_examples_is_noticed():
    x, y = np.arange(200, dtype="float32"), np.arange(200) % 3
    swapped = np.arange(200)
    swapped[[150, 151]] = 151, 150
    same = digest(x, y)
    others = [
        digest(x[swapped], y[swapped]),
        digest(x, y[swapped]),
        digest(x[:-1], y[:-1]),
        digest(x.astype("float64"), y),
        digest(x, y, np.ones(200)),
        digest(x, y, salt=bytes(16)),
    ]
    assert digest(x.copy(), y.copy()) == same and len({same, *others}) == 7


def test_how_the_examples_are_read_makes_no_difference():
    x, y = np.arange(5_000, dtype="float32")[:, np.newaxis], np.arange(5_000)
    assert digest(x, y) == digest(Pairs(x, y)) != digest(Pairs(x[::-1], y))


def test_another_shuffling_of_many_examples_is_noticed():
    n = 20 * MOST_COMPARED
    x, y = np.zeros([n, 1], "float32"), np.arange(n) % 10
    order = np.random.default_rng(0).permutation(n)
    assert digest(x, y) != digest(x, y[order])


def test_strings_of_any_length_are_told_apart():
    y = np.zeros(2)
    texts = [["ab", "c"], ["a", "bc"], ["abc", ""]]
    found = {digest(np.array(of), y) for of in texts}
    assert len(found) == 3
    assert digest(np.array(texts[0], object), y) == digest(np.array(texts[0]), y)
