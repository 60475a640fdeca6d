"""Audits of real trainings accept what is private, and refute what only says so."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tf_adaptive_dp as dp
from tf_adaptive_dp.auditing.bounds import many_run_epsilon
from tf_adaptive_dp.auditing.canaries import Canaries, PrivacyAudit
from tf_adaptive_dp.mechanism import clipping
from tf_adaptive_dp.mechanism.noise import GaussianNoise

DELTA = 1e-5
NUMBERS, CLIP_WEIGHTS = GaussianNoise._numbers, clipping.clip_weights


# The mechanism, sound and broken.


def no_noise(monkeypatch):
    monkeypatch.setattr(
        GaussianNoise, "_numbers", lambda *args: [tf.zeros_like(z) for z in NUMBERS(*args)]
    )


def noise_times(factor):
    def patch(monkeypatch):
        monkeypatch.setattr(
            GaussianNoise, "_numbers", lambda *args: [factor * z for z in NUMBERS(*args)]
        )

    return patch


def no_noise_on(variable):
    def patch(monkeypatch):
        def numbers(*args):
            return [tf.zeros_like(z) if i == variable else z for i, z in enumerate(NUMBERS(*args))]

        monkeypatch.setattr(GaussianNoise, "_numbers", numbers)

    return patch


def clip_times(factor):
    def patch(monkeypatch):
        def weights(norms, clip, *args):
            return CLIP_WEIGHTS(norms, factor * tf.cast(clip, tf.float32), *args)

        monkeypatch.setattr(clipping, "clip_weights", weights)

    return patch


def one_release_of_many_canaries(num_rows=100_000):
    """Each row of a table is a run of its own: half have one example, half have none."""
    with_, without = np.arange(0, num_rows, 2), np.arange(1, num_rows, 2)
    table = tf.keras.layers.Embedding(num_rows, 1, embeddings_initializer="zeros")
    size = float(len(with_))  # undone by the rate
    optimizer = dp.DPSGD(1.0, 1.0, learning_rate=size, expected_batch_size=size, seed=3)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = -20.0 * table(tf.constant(with_[:, np.newaxis]))[:, 0, 0]
        optimizer.minimize(loss, table.trainable_variables, tape)

    table.build(None)
    step()
    moved = table.embeddings.numpy()[:, 0]
    claimed = dp.accounting.epsilon(1.0, 1.0, 1, 0.01, accountant="pld")
    assert optimizer.ledger.segments == [(1.0, size, 1)]
    return many_run_epsilon(moved[with_], moved[without], 0.01).epsilon_lower_bound, claimed


@pytest.mark.slow_on(2)
def test_the_gaussian_mechanism_keeps_its_word_closely():
    bound, claimed = one_release_of_many_canaries()
    assert 0.7 * claimed < bound <= claimed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("fault", [noise_times(2 / 3), clip_times(1.5)], ids=["noise", "clip"])
def test_two_thirds_of_the_noise_or_half_as_much_clip_again_are_refuted(fault, monkeypatch):
    fault(monkeypatch)
    bound, claimed = one_release_of_many_canaries()
    assert bound > claimed


def audited_training(score, num_canaries=400, epochs=2, **kwargs):
    """A real training in which each canary has an input of its own, read by two kernels."""
    generator = np.random.default_rng(0)
    x = np.zeros([100, num_canaries + 3], np.float32)
    x[:, num_canaries:] = generator.normal(size=[100, 3])
    y = (x[:, -1:] > 0).astype(np.float32)
    own_input = 30 * np.eye(*[num_canaries, num_canaries + 3], dtype=np.float32)
    canaries = Canaries(own_input, np.ones([num_canaries, 1], np.float32), seed=5)
    expected = len(x) + num_canaries // 2
    sampling = dp.PoissonSampling(0.5, max_batch_size=expected + 60, steps=20, seed=5)
    inputs = tf.keras.Input([num_canaries + 3])
    kernels = [
        tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2)
    ]
    model = tf.keras.Model(inputs, sum(kernel(inputs) for kernel in kernels))
    size = sampling.expected_batch_size(expected)
    model.compile(
        dp.DPSGD(1.0, 6.0, learning_rate=0.5, expected_batch_size=size, seed=5),
        loss=tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"),
    )
    audit = PrivacyAudit(canaries, DELTA, score=score, num_guesses=150, **kwargs)
    batches = dp.poisson_batches(canaries.mix((x, y)), sampling)
    history = model.fit(
        batches, epochs=epochs, steps_per_epoch=20 // epochs, verbose=0, callbacks=[audit]
    ).history
    return audit, history, sampling.epsilon_spent(model.optimizer, expected, DELTA)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("score", ["loss", "gradient"])
def test_a_private_training_is_not_refuted(score):
    audit, history, claimed = audited_training(score)
    assert 1 < claimed < 2
    assert max(history["audit_epsilon"]) < claimed
    # The attack is no blind one, though.
    assert audit.report.num_correct > 75 + 3 * np.sqrt(150 / 4)


@pytest.mark.slow_on(2)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("score", ["loss", "gradient"])
@pytest.mark.parametrize("fault", [no_noise, clip_times(10)], ids=["no noise", "clip"])
def test_training_without_noise_or_with_ten_times_the_clip_is_refuted(score, fault, monkeypatch):
    fault(monkeypatch)
    audit, history, claimed = audited_training(score)
    assert audit.report.epsilon_lower_bound > claimed
    assert history["audit_epsilon"][-1] == audit.report.epsilon_lower_bound


@pytest.mark.slow
@pytest.mark.parametrize("variable", [0, 1])
def test_training_without_noise_on_one_variable_is_refuted(variable, monkeypatch):
    no_noise_on(variable)(monkeypatch)
    audit, _, claimed = audited_training("gradient")
    assert audit.report.epsilon_lower_bound > claimed
    assert audit.report.num_tests == 3


# Canaries and the callback.


def test_half_of_the_canaries_join_independently():
    included = Canaries(np.zeros([20_000, 1]), np.zeros(20_000), seed=7).included
    assert abs(included.mean() - 0.5) < 5 * 0.5 / np.sqrt(20_000)
    assert abs(np.mean(included[1:] == included[:-1]) - 0.5) < 5 * 0.5 / np.sqrt(20_000)
    assert not np.array_equal(*[Canaries(np.zeros(200), np.zeros(200)).included for _ in range(2)])


def test_the_mixture_holds_the_data_and_the_included_canaries():
    canaries = Canaries({"a": np.arange(10.0)}, np.arange(10) % 2, seed=1)
    data = ({"a": np.full(4, -1.0, np.float32)}, np.full(4, 9), np.full(4, 0.5, np.float32))
    x, y, weight = canaries.mix(data)
    np.testing.assert_array_equal(x["a"], [-1] * 4 + list(np.flatnonzero(canaries.included)))
    np.testing.assert_array_equal(y[4:], (np.arange(10) % 2)[canaries.included])
    np.testing.assert_array_equal(weight, [0.5] * 4 + [1.0] * int(canaries.included.sum()))
    assert x["a"].dtype == np.float32


def test_canaries_of_different_lengths_or_kinds_are_refused():
    with pytest.raises(ValueError, match="same number of canaries. Received: lengths \\[2, 3\\]"):
        Canaries(np.zeros([2, 1]), np.zeros(3))
    with pytest.raises(TypeError, match="float64.*int64"):
        Canaries(np.zeros(20), np.full(20, 0.5)).mix((np.zeros(3), np.zeros(3, int)))


def linear(loss="none", optimizer="sgd"):
    model = tf.keras.Sequential(
        [tf.keras.Input([40]), tf.keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    if loss == "none":
        loss = tf.keras.losses.MeanSquaredError(reduction="none")
    model.compile(optimizer, loss=loss)
    return model


def fit(model, canaries, audit, **kwargs):
    x, y = canaries.mix((np.zeros([4, 40], np.float32), np.zeros([4, 1], np.float32)))
    return model.fit(x, y, 64, shuffle=False, verbose=0, callbacks=[audit], **kwargs).history


CANARIES = Canaries(np.eye(40, dtype=np.float32), np.ones([40, 1], np.float32), seed=2)


def test_a_bound_above_the_claim_is_warned_of():
    audit = PrivacyAudit(CANARIES, DELTA, claimed_epsilon=0.1)
    with pytest.warns(UserWarning, match="not as private as claimed: ε is at least .* not 0.1"):
        fit(linear(), CANARIES, audit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(linear(), CANARIES, PrivacyAudit(CANARIES, DELTA, claimed_epsilon=50.0))


def test_the_audit_leaves_the_training_as_it_is():
    audited, alone = linear(), linear()
    fit(audited, CANARIES, PrivacyAudit(CANARIES, DELTA, score="gradient"), epochs=3)
    fit(alone, CANARIES, tf.keras.callbacks.Callback(), epochs=3)
    for a, b in zip(audited.get_weights(), alone.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow_on(3)
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("score", ["loss", "gradient"])
def test_the_loss_of_the_model_may_be_reduced(score):
    def scores(loss):
        audit = PrivacyAudit(CANARIES, DELTA, score=score)
        fit(linear(loss, dp.DPSGD(1.0, 0.0, learning_rate=0.1)), CANARIES, audit)
        return audit._attack()

    expected = scores("none")
    assert np.ptp(expected) > 1e-3
    for loss in ("mse", tf.keras.losses.MeanSquaredError()):
        np.testing.assert_allclose(scores(loss), expected, rtol=1e-5)


@pytest.mark.slow_on(2)
def test_the_score_of_a_gradient_is_the_move_along_it_clipped():
    model = linear(optimizer=dp.DPSGD(0.1, 0.0, learning_rate=1.0, expected_batch_size=1.0))
    audit = PrivacyAudit(CANARIES, DELTA, score="gradient")
    fit(model, CANARIES, audit)
    # All gradients are (-2 in the own input, -2 in the bias), hence -0.1 / √2 in each when clipped.
    clipped, in_ = 0.1 / np.sqrt(2), CANARIES.included
    expected = np.column_stack([clipped**2 * in_, np.full(40, clipped**2 * in_.sum())])
    np.testing.assert_allclose(audit._scores, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_further_fit_of_the_same_model_continues_and_another_model_starts_afresh():
    once, twice = (PrivacyAudit(CANARIES, DELTA, score="gradient") for _ in range(2))
    fit(linear(), CANARIES, once, epochs=2)
    model = linear()
    fit(model, CANARIES, twice)
    fit(model, CANARIES, twice)
    np.testing.assert_allclose(twice._scores, once._scores, rtol=1e-6)
    again = linear()
    fit(again, CANARIES, twice, epochs=2)
    np.testing.assert_allclose(twice._scores, once._scores, rtol=1e-6)


def test_a_score_of_the_users_own():
    def weights(model, x, y):
        return x @ model.get_weights()[0][:, 0]

    audit = PrivacyAudit(CANARIES, DELTA, score=weights, num_guesses=30)
    history = fit(linear(), CANARIES, audit)
    assert audit.report.num_correct > 25
    assert history["audit_epsilon"] == [audit.report.epsilon_lower_bound]


def test_what_the_audit_cannot_use_is_refused():
    with pytest.raises(TypeError, match="`canaries` must be `Canaries`"):
        PrivacyAudit(np.eye(4), DELTA)
    with pytest.raises(ValueError, match="`score` must be one of 'loss', 'gradient'"):
        PrivacyAudit(CANARIES, DELTA, score="norm")
    with pytest.raises(ValueError, match="`num_guesses` must be from 1"):
        PrivacyAudit(CANARIES, DELTA, num_guesses=41)
    with pytest.raises(ValueError, match="pass it `loss`, a function .*\\['mse'\\]"):
        fit(linear(["mse"]), CANARIES, PrivacyAudit(CANARIES, DELTA))
    with pytest.raises(ValueError, match="one number for each canary"):
        loss = tf.keras.losses.MeanSquaredError()
        fit(linear(), CANARIES, PrivacyAudit(CANARIES, DELTA, score="loss", loss=loss))


def test_types_of_the_data_change_no_canary():
    words = Canaries(np.array([["horse"]] * 4), np.array([3] * 4), seed=1)
    x, y = words.mix((np.array([["cat"]] * 3), np.zeros(3, np.uint8)))
    assert x[-1, 0] == "horse" and y[-1] == 3 and y.dtype == np.uint8
    large = Canaries(np.full(4, 0.1), np.full(4, 300), seed=1)
    with pytest.raises(TypeError, match="`y` of the canaries.*Received: .*int64 that differ as i"):
        large.mix((np.zeros(3, np.float32), np.zeros(3, np.int8)))
    assert large.mix((np.zeros(3, np.float32), np.zeros(3, int)))[1][-1] == 300


def attacked(score, epochs, claimed=1e-9):
    """Warnings of an audit whose scores are given for each epoch."""
    scores = iter(score)
    audit = PrivacyAudit(
        CANARIES, DELTA, score=lambda *_: next(scores), num_guesses=40, claimed_epsilon=claimed
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            audit.on_epoch_end(epoch, {})
        audit.on_train_end()
    return audit, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_only_the_last_epoch_is_warned_of():
    knows, nothing = CANARIES.included.astype(float), np.zeros(40)
    assert not attacked([knows, nothing], 2)[1]
    audit, said = attacked([nothing, knows], 2)
    assert len(said) == 1 and "not as private as claimed" in said[0]
    assert audit.report.num_correct > 30


def test_scores_that_are_nan_count_as_the_lowest_and_are_warned_of_once():
    scores = np.where(CANARIES.included, 1.0, np.nan)
    audit, said = attacked([scores, scores], 2, claimed=None)
    assert len(said) == 1 and "NaN counts as the lowest" in said[0]
    assert audit.report == attacked([CANARIES.included], 1)[0].report


@pytest.mark.parametrize("score", ["loss", "gradient"])
def test_labels_without_the_axis_of_the_outputs_and_a_model_that_is_not_built(score):
    y = np.arange(40, dtype=np.float32) % 3
    scores = []
    for labels, inputs in ((y, []), (y[:, np.newaxis], [tf.keras.Input([40])])):
        canaries = Canaries(CANARIES.x, labels, seed=2)
        dense = tf.keras.layers.Dense(1, kernel_initializer="zeros")
        model = tf.keras.Sequential([*inputs, dense])
        model.compile("sgd", "mse")
        audit = PrivacyAudit(canaries, DELTA, score=score)
        data = canaries.mix((CANARIES.x[:4], labels[:4]))
        model.fit(*data, 64, epochs=2, shuffle=False, verbose=0, callbacks=[audit])
        scores.append(audit._scores if score == "gradient" else audit._first_losses)
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-6)


def test_a_variable_that_the_loss_does_not_reach_moves_along_no_gradient():
    inputs = tf.keras.Input([40])
    first, second = (tf.keras.layers.Dense(1, name=name)(inputs) for name in "ab")
    model = tf.keras.Model(inputs, {"a": first, "b": second})
    model.compile("sgd", {"a": "mse", "b": "mse"})
    audit = PrivacyAudit(
        CANARIES, DELTA, score="gradient", loss=lambda y, z: tf.reduce_sum((y - z["a"]) ** 2, 1)
    )
    x, y = CANARIES.x, CANARIES.y
    model.fit(x, {"a": y, "b": y}, verbose=0, callbacks=[audit])
    moved = (audit._scores != 0).any(axis=0)
    assert list(moved) == [True, True, False, False]
