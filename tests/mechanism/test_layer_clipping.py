"""Clipping by layer: each part within its share of C, the whole within C."""

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
LAYERS = ["a", "a", "b"]


def sums(rows, clipping, clip=1.0, layers=LAYERS, **kwargs):
    mechanism = zoo.make_mechanism(clipping=clipping, l2_norm_clip=clip, expected_batch_size=1)
    return zoo.release(mechanism, *rows, layers=layers, **kwargs)


def rows_of(seed, batch_size=1, size=30.0):
    generator = np.random.default_rng(seed)
    return [size * generator.normal(size=(batch_size, n)) for n in (3, 2, 4)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("shares, of_a", [(None, 0.5), ({"a": 1.0, "b": 2.0}, 0.2)])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_each_layer_is_clipped_to_its_share(shares, of_a, mode):
    released = sums(rows_of(0), dp.PerLayerClipping(shares), clip=3.0, mode=mode)
    squared = [float(np.sum(np.square(s))) for s in released]
    assert squared[0] + squared[1] == pytest.approx(9.0 * of_a, rel=1e-5)
    assert squared[2] == pytest.approx(9.0 * (1 - of_a), rel=1e-5)


@pytest.mark.slow_after(23)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("precondition", [False, True])
def test_an_example_changes_the_sum_by_the_clip_at_most(seed, precondition):
    generator = np.random.default_rng(seed)
    rows = rows_of(seed, batch_size=3, size=10.0 ** generator.uniform(-2, 2))
    kwargs = {}
    if precondition:
        kwargs["scale"] = [generator.uniform(0.1, 9, 3), generator.uniform(0.1, 9, 2), [1.0] * 4]
        kwargs["shift"] = [generator.normal(size=n) for n in (3, 2, 4)]
        kwargs = {k: [np.asarray(a, "float32") for a in v] for k, v in kwargs.items()}
    without = [r * (np.arange(3) != 1)[:, None] for r in rows]
    difference = [a - b for a, b in zip(*(sums(r, "per_layer", **kwargs) for r in (rows, without)))]
    assert np.sqrt(sum(np.sum(d**2) for d in difference)) <= 1 + 1e-4


def test_small_gradients_stay_as_they_are():
    rows = rows_of(1, size=1e-3)
    for released, row in zip(sums(rows, "per_layer"), rows):
        np.testing.assert_allclose(released, row[0], rtol=1e-5)


def test_an_example_with_one_layer_that_is_not_finite_counts_as_zero_in_all():
    rows = rows_of(2, batch_size=2)
    alone = sums([r[1:] for r in rows], "per_layer")
    rows[2][0, 1] = np.nan
    for released, expected in zip(sums(rows, "per_layer"), alone):
        np.testing.assert_allclose(released, expected, rtol=1e-5)


@pytest.mark.in_turns
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_share_that_is_zero_in_float32_leaves_nothing_of_its_layer_and_the_rest_as_it_is(mode):
    """An example without a gradient for that layer would otherwise make the sum NaN."""
    rows = rows_of(3, batch_size=2)
    for row in rows[:2]:
        row[0] = 0.0
    shares = dp.PerLayerClipping({"a": 1e-60, "b": 1.0})
    released = sums(rows, shares, mode=mode)
    expected = sum(row / np.linalg.norm(row) for row in rows[2])
    np.testing.assert_allclose(released[2], expected, rtol=1e-5)
    assert not np.any(released[0]) and not np.any(released[1])


@pytest.mark.parametrize(
    "shares, error, message",
    [
        ({"a": 1.0}, ValueError, "must name every layer that is trained. .* missing: b"),
        ({"a": -1.0}, ValueError, r"`shares\['a'\]` must be finite and greater than 0"),
        ({}, TypeError, "`shares` must be a dictionary from the names of layers"),
        ([1.0], TypeError, "`shares` must be a dictionary"),
        ({"a": 1.0, "c": 2.0}, ValueError, "names layers that are not trained. .* for c; .* a, b"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares, error, message):
    with pytest.raises(error, match=message):
        sums(rows_of(0), dp.PerLayerClipping(shares))


NESTED = ["m/a", "m/a", "m/n/b"]


@pytest.mark.parametrize("names", [("a", "b"), ("m/a", "n/b"), ("a", "m/n/b")])
def test_a_layer_can_be_named_by_the_end_of_its_path(names):
    shares = dict(zip(names, [1.0, 2.0]))
    released = sums(rows_of(0), dp.PerLayerClipping(shares), layers=NESTED)
    assert float(np.sum(np.square(released[2]))) == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize(
    "layers, shares",
    [
        (["m/a", "n/a", "b"], {"a": 1.0, "b": 2.0}),
        (NESTED, {"a": 1.0, "m/a": 2.0, "b": 1.0}),
        (["m/ba", "m/ba", "b"], {"a": 1.0, "b": 1.0}),
    ],
    ids=["two layers", "one layer twice", "a part of a name"],
)
def test_a_name_means_one_layer(layers, shares):
    with pytest.raises(ValueError, match="`shares` must mean one layer|not trained"):
        sums(rows_of(0), dp.PerLayerClipping(shares), layers=layers)


def test_the_name_of_a_layer_goes_before_the_end_of_another():
    shares = dp.PerLayerClipping({"a": 1.0, "m/a": 2.0})
    released = sums(rows_of(0), shares, layers=["a", "a", "m/a"])
    assert float(np.sum(np.square(released[2]))) == pytest.approx(0.8, rel=1e-5)


class Two(tf.keras.Model):
    """Builds its layers when it is called, by other rules for names than a Sequential model."""

    def __init__(self, names):
        super().__init__(name="two")
        self.first, self.second = (tf.keras.layers.Dense(6, name=name) for name in names)

    def call(self, x):
        return self.second(self.first(x))


def moved_by(model, clip=1e-3):
    """How far each variable moves in one step at a rate of 1, for parts that are all clipped."""
    loss = tf.keras.losses.MeanSquaredError(reduction="none")
    optimizer = dp.DPSGD(clip, 0.0, clipping="per_layer", learning_rate=1.0)
    model.compile(optimizer, loss=loss)
    x = 100 * tf.ones([1, 6])
    model(x)
    before = model.get_weights()
    model.fit(x, x, verbose=0)
    return [np.linalg.norm(a - b) / clip for a, b in zip(model.get_weights(), before)]


def test_layers_of_a_subclassed_model_are_clipped_each_on_its_own():
    moved = moved_by(Two(["first", "second"]))
    assert np.hypot(*moved[:2]) == pytest.approx(0.5**0.5, rel=1e-2)
    assert np.hypot(*moved[2:]) == pytest.approx(0.5**0.5, rel=1e-2)


def test_layers_that_names_do_not_tell_apart_are_clipped_as_one_with_a_warning():
    with pytest.warns(UserWarning, match="name two/same/kernel, two/same/bias. .* as one"):
        moved = moved_by(Two(["same", "same"]))
    assert np.linalg.norm(moved) == pytest.approx(1, rel=1e-2)


def test_fit_clips_the_layers_of_the_model(tmp_path):
    model = catalogue.mlp()
    shares = {"hidden": 3.0, "logits": 4.0}
    clipping = dp.PerLayerClipping(shares)
    kwargs = {"l2_norm_clip": 1e-3, "noise_multiplier": 0.0, "clipping": clipping}
    model.compile(catalogue.make("DPSGD", **kwargs), loss=catalogue.loss())
    before = model.get_weights()
    x, y = catalogue.data(1)
    model.fit(x, y, verbose=0)
    moved = [np.sum((a - b) ** 2) for a, b in zip(model.get_weights(), before)]
    # The learning rate is 0.1; float32 weights lose some of so small a step.
    assert np.sqrt(moved[0] + moved[1]) == pytest.approx(0.1 * 1e-3 * 3 / 5, rel=1e-2)
    assert np.sqrt(moved[2] + moved[3]) == pytest.approx(0.1 * 1e-3 * 4 / 5, rel=1e-2)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer._mechanism.clipping == clipping
