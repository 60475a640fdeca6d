"""Clipping by layer: each part within its share of C, the whole within C."""

import numpy as np
import pytest

import tf_adaptive_dp as dp
from tests.helpers import catalogue, zoo

pytestmark = pytest.mark.filterwarnings("ignore:Under eager execution")
LAYERS = ["a", "a", "b"]


def sums(rows, clipping, clip=1.0, **kwargs):
    mechanism = zoo.make_mechanism(clipping=clipping, l2_norm_clip=clip, expected_batch_size=1)
    return zoo.release(mechanism, *rows, layers=LAYERS, **kwargs)


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


@pytest.mark.parametrize(
    "shares, error, message",
    [
        ({"a": 1.0}, ValueError, "must name every layer that is trained. .* missing: b"),
        ({"a": -1.0}, ValueError, r"`shares\['a'\]` must be finite and greater than 0"),
        ({}, TypeError, "`shares` must be a dictionary from the names of layers"),
        ([1.0], TypeError, "`shares` must be a dictionary"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares, error, message):
    with pytest.raises(error, match=message):
        sums(rows_of(0), dp.PerLayerClipping(shares))


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
    loaded = catalogue.tf.keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer._mechanism.clipping == clipping
