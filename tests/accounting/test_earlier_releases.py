"""A new optimizer on weights that were trained with privacy is told what was spent."""

import contextlib
import gc
import re
import warnings
import weakref

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tests.helpers import catalogue
from tf_adaptive_dp._keras.generation import GENERATION, keras
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.accounting import BandedNoise, earlier_releases
from tf_adaptive_dp.accounting.releases import Segment


def variables(number=1):
    return [tf.Variable(tf.ones([2])) for _ in range(number)]


def optimizer(**kwargs):
    return dp.DPSGD(1.0, 0.5, learning_rate=0.1, **kwargs)


def train(of, weights, steps=1, frozen=()):
    """So many steps in a `tf.function` of its own, whose loss reads frozen weights, too."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.linalg.matvec(x, w) for w in [*weights, *frozen]])
        of.minimize(loss, weights, tape)

    for _ in range(steps):
        step(tf.ones([4, 2]))


@contextlib.contextmanager
def silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "These weights come from")
        yield


@contextlib.contextmanager
def told(count, *segments):
    """The warning comes once, and with these releases."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (text,) = [str(w.message) for w in caught if "These weights come from" in str(w.message)]
    assert f"come from {count} private steps" in text
    assert f"restore([{', '.join(map(str, segments))}, *" in text
    assert text.index("from_config(") < text.index("restore(")  # the shorter way comes first


def compiled(model, **kwargs):
    model.compile(catalogue.make("DPSGD", **kwargs), loss=catalogue.loss())
    return model


@pytest.mark.slow_on(2)
def test_epsilon_begins_anew_with_a_new_optimizer_and_a_warning_says_how_to_carry_it():
    def pass_over_the_data():
        x, y = (np.resize(a, [200, *a.shape[1:]]) for a in catalogue.data())
        model.fit(x, y, batch_size=10, verbose=0)

    def shown():
        return round(dp.epsilon_spent(model.optimizer, 200, 1e-5), 2)

    model = compiled(catalogue.mlp(), noise_multiplier=1.0)
    pass_over_the_data()
    first = model.optimizer
    compiled(model, noise_multiplier=1.0)
    with told(20, (1.0, 10.0, 20)):
        pass_over_the_data()
    assert shown() == 2.48
    model.optimizer.ledger.restore([*first.ledger.segments, *model.optimizer.ledger.segments])
    assert shown() == 2.97


@pytest.mark.slow
def test_the_line_of_the_warning_carries_what_was_spent():
    weights, carrying = variables(), optimizer()
    train(optimizer(), weights, 3)
    with pytest.warns(UserWarning, match="These weights") as caught:
        train(carrying, weights, 2)
    (line,) = re.findall(r"`(optimizer\.ledger\.restore\(.*?\))`,", str(caught[-1].message))
    exec(line, {"optimizer": carrying})
    assert carrying.ledger.segments == [(0.5, 4.0, 3), (0.5, 4.0, 2)]
    with silent():
        train(carrying, weights)
        train(carried_by_its_configuration(carrying), weights)
    assert carrying.ledger.num_releases == 6


@pytest.mark.slow
def test_the_line_stays_short_and_can_be_run_after_more_optimizers_than_a_ledger_has_segments():
    weights, carrying = variables(), optimizer()
    size = carrying.ledger.MAX_SEGMENTS

    def text_of_one_more(new):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(new, weights)
        return "".join(str(w.message) for w in caught)

    texts = [text_of_one_more(optimizer()) for _ in range(size + 6)]
    assert f"restore([*{size - 2} * [(0.5, 4.0, 1)], *optimizer" in texts[size - 2]
    last = text_of_one_more(carrying)
    assert f"come from {size + 6} private steps" in last and len(last) < len(texts[2]) + 100
    (line,) = re.findall(r"`(optimizer\.ledger\.restore\(.*?\))`,", last)
    exec(line, {"optimizer": carrying})
    assert carrying.ledger.segments == [*[(0.5, 4.0, 1)] * (size - 2), (0.5, 4.0, 8), (0.5, 4.0, 1)]
    assert len(carrying.ledger.checks) == size
    with silent():
        train(carried_by_its_configuration(carrying), weights)


@pytest.mark.slow_on(2)
def test_a_ledger_with_no_free_segment_is_carried_too():
    weights, old = variables(), optimizer()
    segments = [(1.0, float(size), 1) for size in range(1, old.ledger.MAX_SEGMENTS + 1)]
    old.ledger.restore(segments)
    with silent():
        train(old, weights)
        new = carried_by_its_configuration(old)
        new.noise_multiplier = 0.25
        train(new, weights)
        train(carried_by_its_configuration(new), weights)
    assert len(new.ledger.segments) == old.ledger.MAX_SEGMENTS


def carried_by_its_configuration(old):
    return type(old).from_config(old.get_config())


def carried_by_hand(old):
    new = dp.DPAdam(1.0, 0.7)
    new.ledger.restore(old.ledger.segments)
    return new


def carried_by_a_checkpoint(old):
    new = optimizer()
    new.build(old.weights)
    path = tf.train.Checkpoint(optimizer=old).write("ram://earlier_releases")
    tf.train.Checkpoint(optimizer=new).read(path).expect_partial()
    return new


@pytest.mark.slow
@pytest.mark.parametrize(
    "carry",
    [carried_by_its_configuration, carried_by_hand, carried_by_a_checkpoint, lambda old: old],
)
def test_an_optimizer_whose_ledger_holds_them_hears_nothing(carry):
    weights, old = variables(), optimizer()
    old.weights = weights
    with silent():
        train(old, weights, 3)
        new = carry(old)
        train(new, weights, 2)
        assert new.ledger.num_releases == 5
        last = carried_by_its_configuration(new)
        train(last, weights)
    with told(6, *map(tuple, last.ledger.segments)):
        train(optimizer(), weights)


@pytest.mark.slow
def test_all_releases_are_told_and_of_all_ledgers():
    weights = variables()
    train(optimizer(), weights, 3)
    with told(3, (0.5, 4.0, 3)):
        second = optimizer()
        train(second, weights, 2)
    train(second, weights)
    with told(6, "*2 * [(0.5, 4.0, 3)]"):
        train(optimizer(), weights)
    third = carried_by_its_configuration(second)
    with told(4, (0.5, 4.0, 3), (0.5, 4.0, 1)):  # of those alike the number counts
        train(third, weights)
    last = optimizer()
    with pytest.warns(UserWarning, match="come from 8 private steps"):
        train(last, weights)
    last.ledger.restore([(0.5, 4.0, 9)])
    with silent():
        train(carried_by_its_configuration(last), weights)
    with pytest.warns(UserWarning, match="come from 10 private steps"):
        train(optimizer(), weights)


@pytest.mark.slow
def test_weights_of_other_optimizers_are_not_meant():
    head, base = variables(1), variables(2)
    one, other = optimizer(), optimizer()
    with silent():
        train(one, head, 2)
        train(other, base, 3)  # as the two of a GAN
        train(one, head)
        train(other, base)
    with told(7, (0.5, 4.0, 3), (0.5, 4.0, 4)):  # unfrozen
        train(optimizer(), [*head, *base])


@pytest.mark.slow_on(2)
def test_releases_on_frozen_weights_that_the_loss_reads_are_told_once():
    base, head, new = variables(1), variables(1), optimizer()
    train(optimizer(), base, 3)
    with told(3, (0.5, 4.0, 3)):
        train(new, head, 2, frozen=base)
    with silent():
        train(new, head, frozen=base)
        train(optimizer(), variables(1))  # whose loss does not read them


@pytest.mark.slow_on(2)
def test_nothing_is_told_of_frozen_weights_whose_releases_the_ledger_holds():
    base, head, old = variables(1), variables(1), optimizer()
    with silent():
        train(old, [*base, *head], 3)
        new = carried_by_its_configuration(old)
        train(new, head, 2, frozen=base)
        train(carried_by_its_configuration(new), [*base, *head])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["a new head", "LoRA"])
def test_a_model_on_a_frozen_base_that_was_trained_privately_is_told(kind):
    layers = keras.layers
    if kind == "LoRA" and GENERATION == 2:
        pytest.skip("Keras 2 has no LoRA")
    base = layers.Dense(6, activation="tanh")
    old = compiled(keras.Sequential([keras.Input([6]), base, layers.Dense(3)]))
    catalogue.fit(old)
    if kind == "LoRA":
        base.enable_lora(2)
        base.bias.trainable = False
    else:
        base.trainable = False
    model = compiled(keras.Sequential([keras.Input([6]), base, layers.Dense(3)]))
    with told(4, (0.5, 8.0, 4)):
        catalogue.fit(model)
    assert model.optimizer.ledger.segments == [(0.5, 8.0, 4)]


@pytest.mark.slow_on(2)
def test_weights_that_were_validated_amid_their_training_remember_all_releases():
    model = compiled(catalogue.mlp())
    catalogue.fit(model)
    dp.validate(model, tuple(part[:8] for part in catalogue.data()))
    catalogue.fit(model)  # whose step is not traced anew
    compiled(model)
    with told(8, (0.5, 8.0, 8)):
        catalogue.fit(model)


@pytest.mark.slow_on(2)
def test_copies_of_values_and_steps_that_were_only_traced_leave_nothing():
    weights, copies = variables(), variables()
    train(optimizer(), copies, 2)
    weights[0].assign(copies[0])
    traced = optimizer()
    with silent():
        train(traced, weights, 0)
        train(optimizer(), weights)


def test_nothing_is_kept_longer_than_the_weights():
    weights, old = variables(), optimizer()
    train(old, weights)
    ledger = weakref.ref(old.ledger)
    del old
    gc.collect()
    assert ledger() is not None
    del weights
    gc.collect()
    assert ledger() is None


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("carried", [False, True])
def test_a_step_does_not_refer_to_the_optimizer_before_it(carried):
    """Once that one was gone, the step failed: TensorFlow had noted its variables only weakly."""
    weights, old = [tf.Variable(tf.zeros([2]))], optimizer()
    train(old, weights)
    new = type(old).from_config(old.get_config()) if carried else optimizer()

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(x, weights[0])
        new.minimize(loss, weights, tape)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noted = step.get_concrete_function(tf.ones([4, 2])).graph.variables
    of_old = [*map(native, old.variables), old.ledger._watermark]
    assert noted and not {id(v) for v in noted} & {id(v) for v in of_old}


def test_no_release_is_taken_for_that_of_two_ledgers_or_of_another_noise():
    two = {1: [Segment(1.0, 8.0, 2), Segment(2.0, 8.0, 1)], 2: [Segment(1.0, 8.0, 2)]}

    def missing(*counts):
        segments = [Segment(1.0, 8.0, n) for n in counts]
        return list(earlier_releases._not_held([*segments, Segment(2.0, 8.0, 1)], two))

    assert [missing(4), missing(3), missing(1, 1), missing(1)] == [[], [2], [2], [1, 2]]
    independent, banded = (
        dp.DPSGD(1.0, 1.0, noise=noise).ledger for noise in (None, BandedNoise(2))
    )
    assert earlier_releases._are_alike(independent, independent)
    assert not earlier_releases._are_alike(independent, banded)


@pytest.mark.slow_on(2)
def test_events_beside_the_gradients_are_told():
    weights, old = variables(), optimizer()
    old.ledger.other_events = (dp_accounting.GaussianDpEvent(3.0),)
    train(old, weights)
    with pytest.warns(UserWarning, match=r"Add \[GaussianDpEvent\(noise_multiplier=3.0\)\] to"):
        train(optimizer(), weights)


@pytest.mark.slow_on(2)
def test_events_that_were_not_taken_over_with_the_releases_are_told():
    weights, old, new = variables(), optimizer(), optimizer()
    old.ledger.other_events = (dp_accounting.GaussianDpEvent(3.0),)
    train(old, weights)
    old.ledger.fewest_units = 50
    new.ledger.restore(old.ledger.segments, old.ledger.checks)
    with pytest.warns(UserWarning, match=r"other_events \+= \(GaussianDpEvent\(noise_mult.*3.0\),"):
        train(new, weights)
    assert new.ledger.fewest_units == 50
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(type(new).from_config(old.get_config()), variables())


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("of_users", [True, False])
def test_releases_about_another_unit_cannot_be_carried_by_their_segments(of_users):
    users = {"examples_per_user": 2}
    weights, old = variables(), optimizer(**users if of_users else {})
    train(old, weights, steps=3)
    new = optimizer(**{} if of_users else users)
    new.ledger.restore(old.ledger.segments, old.ledger.checks)  # equal numbers mean nothing
    text = (
        r"protect users.*`sampling.dp_event\(old, num_users\)`" if of_users else "protect examples"
    )
    with pytest.warns(UserWarning, match=f"3 private steps.*{text}"):
        train(new, weights)


@pytest.mark.filterwarnings("ignore:Under eager execution")
def test_eager_steps_are_told_once():
    def step(of):
        with tf.GradientTape() as tape:
            loss = tf.linalg.matvec(tf.ones([4, 2]), weights[0])
        of.minimize(loss, weights, tape)

    weights, old, new = variables(), optimizer(), optimizer()
    with silent():
        step(old)
        step(old)
    with told(2, (0.5, 4.0, 2)):
        step(new)
        step(new)


@pytest.mark.slow
def test_several_replicas_are_told_once():
    with catalogue.mirrored().scope():
        model = compiled(catalogue.mlp())
        catalogue.fit(model)
        compiled(model)
    with told(4, (0.5, 8.0, 4)):
        catalogue.fit(model)


# What a format carries: the ledger, or an error, or nothing.
def _weights_into_a_new_model(path):
    def load(model):
        model.save_weights(path)
        new = compiled(catalogue.mlp())
        new.optimizer.build(new.trainable_variables)
        new.load_weights(path)
        return new

    return load


def _whole(path, **kwargs):
    def load(model):
        model.save(path)
        return tf.keras.models.load_model(path, **kwargs)

    return load


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "path, whole",
    [
        pytest.param(
            *("w", False),
            marks=pytest.mark.skipif(
                GENERATION == 3, reason="Keras 3 writes no weights as TensorFlow checkpoints"
            ),
        ),
        ("w.weights.h5", False),
        ("m.keras", True),
        ("m.h5", True),
    ],
)
def test_formats_in_which_the_ledger_travels(path, whole, tmp_path):
    model = catalogue.mlp()
    catalogue.fit(compiled(model))
    load = (_whole if whole else _weights_into_a_new_model)(str(tmp_path / path))
    with silent():
        new = load(model)
        assert new.optimizer.ledger.segments == [(0.5, 8.0, 4)]
        catalogue.fit(new)
    assert new.optimizer.ledger.segments == [(0.5, 8.0, 8)]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", ["compiled anew", "a frozen part of another model"])
@pytest.mark.parametrize(
    "path",
    [
        "m.keras",
        "m.h5",
        "w.weights.h5",
        pytest.param(
            "directory",
            marks=pytest.mark.skipif(GENERATION == 3, reason="Keras 3 writes no SavedModel"),
        ),
    ],
)
def test_releases_whose_ledger_was_loaded_are_told_though_no_step_followed(path, case, tmp_path):
    model = catalogue.mlp()
    catalogue.fit(compiled(model))
    load = _weights_into_a_new_model if "weights" in path else _whole
    with silent():
        loaded = load(str(tmp_path / path))(model)
    old = loaded.optimizer
    if case == "compiled anew":
        new = compiled(loaded)
    else:
        loaded.trainable = False
        new = compiled(keras.Sequential([loaded, keras.layers.Dense(3)]))
    with told(4, (0.5, 8.0, 4)):
        catalogue.fit(new)
    with silent():  # once; and a copy of what was loaded has all there is to tell
        catalogue.fit(new)
        copy = type(old).from_config(old.get_config())
        other = load(str(tmp_path / path))(model)
        other.compile(copy, catalogue.loss())
        catalogue.fit(other)


@pytest.mark.slow_on(2)
def test_copies_that_make_no_step_are_not_told_twice():
    weights, old = variables(2), optimizer()
    train(old, weights, 3)
    copy = carried_by_its_configuration(old)
    copy.build(weights)
    with silent():
        train(old, weights)
    other = optimizer()
    with told(4, (0.5, 4.0, 4)):
        train(other, weights)


def test_the_statement_says_that_it_counts_one_ledger():
    ledger = [Segment(2.0, 200.0, 6_000)]
    text = dp.privacy_statement(_Ledger(ledger), 60_000, 1e-5, sampling="poisson")
    assert "does not cover what another optimizer released about the data" in " ".join(text.split())


@pytest.mark.slow_on(2)
def test_releases_with_correlated_noise_cannot_be_carried_by_their_segments():
    weights = variables()
    train(optimizer(noise=BandedNoise(2)), weights, steps=3)
    with pytest.warns(UserWarning, match="come from 3 private steps.*correlated over steps"):
        train(optimizer(), weights)


class _Ledger:
    other_events = ()

    def __init__(self, segments):
        self.segments = segments


@pytest.mark.slow_on(2)
@pytest.mark.parametrize("by", ["nothing", "restore", "config"])
def test_a_search_that_chose_the_weights_is_told_unless_it_was_taken_over(by):
    weights, old, new = variables(), optimizer(), optimizer()
    train(old, weights)
    old.ledger.chosen_by_search = True
    if by == "restore":
        new.ledger.restore(old.ledger.segments, old.ledger.checks)
    elif by == "config":
        with silent():
            train(type(old).from_config(old.get_config()), weights)
        return
    with pytest.warns(UserWarning, match="`optimizer.ledger.chosen_by_search = True`"):
        train(new, weights)


@pytest.mark.slow_on(2)
def test_an_optimizer_that_goes_on_hears_once_of_what_another_released_meanwhile():
    weights, first, second = variables(2), optimizer(), optimizer()
    train(first, weights, 3)
    with told(3, (0.5, 4.0, 3)):
        train(second, weights, 2)
    with told(2, (0.5, 4.0, 2)):
        train(first, weights)
    with silent():
        train(second, weights)
        train(first, weights)
    first.ledger.restore([*second.ledger.segments, *first.ledger.segments])
    with silent():
        train(first, weights)
    other = optimizer()
    with pytest.warns(UserWarning, match="These weights come from"):
        train(other, weights, 4)
    with told(4, (0.5, 4.0, 4)):
        train(first, weights)
