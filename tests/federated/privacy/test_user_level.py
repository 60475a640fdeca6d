"""The aggregators in TFF: what they release, and what they refuse."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from federated.privacy.user_ledger import effective_noise_multiplier
from federated.privacy.user_level import UserLevelPrivacy
from tests.helpers.gaussianity import assert_gaussian, assert_independent

SIZE = 20_000
TYPE = tff.types.to_type([(np.float32, [SIZE]), (np.float32, [2, 3])])
PRIVACIES = {
    "fixed": UserLevelPrivacy(1.5, 20, 60, clip=2.0),
    "adaptive": UserLevelPrivacy(1.5, 20, 60, initial_clip=2.0),
    "tree": UserLevelPrivacy(1.5, 20, 60, clip=2.0, mechanism="tree"),
}


pytestmark = pytest.mark.usefixtures("context")


@pytest.fixture(scope="module", params=PRIVACIES)
def released(request):
    """Privacy, process built with a seed, two rounds of it, and the second one once more."""
    privacy = PRIVACIES[request.param]
    tf.keras.utils.set_random_seed(1)
    process = privacy.aggregator().create(TYPE)
    state = process.initialize()
    first = process.next(state, [update(1.0), update(0.0)])
    second = process.next(first.state, [])
    again = process.next(first.state, [])
    return privacy, process, first, second, again


def update(norm):
    return [np.zeros(SIZE, np.float32), np.full([2, 3], norm / np.sqrt(6), np.float32)]


@pytest.mark.slow_after(1)
def test_the_noise_of_an_average_is_clip_times_multiplier_by_clients_per_round(released):
    privacy, _, first, second, _ = released
    stddev = 2.0 * privacy.value_noise_multiplier / 20
    assert_gaussian(first.result[0], stddev)
    if privacy.mechanism == "tree":
        # The sum of both rounds is a node of its own.
        assert_gaussian(first.result[0] + second.result[0], stddev * np.sqrt(1 / 1.5))
    else:
        clip = first.measurements["dp_query_metrics"]["clip"] if privacy.is_adaptive else 2.0
        assert_gaussian(second.result[0], stddev * clip / 2)


@pytest.mark.slow_after(1)
def test_a_round_of_no_clients_releases_noise_around_zero(released):
    _, _, _, second, _ = released
    assert np.isfinite(second.result[0]).all() and np.std(second.result[0]) > 0
    assert np.abs(np.mean(second.result[0])) < 6 * np.std(second.result[0]) / np.sqrt(SIZE)
    assert not second.state.is_init_state


@pytest.mark.slow_after(1)
def test_noise_repeats_neither_over_rounds_nor_when_a_saved_state_is_run_again(released):
    privacy, _, first, second, again = released
    if privacy.mechanism == "gaussian":
        assert_independent(first.result[0], second.result[0])
        assert_independent(second.result[0], again.result[0])
        return
    # The sum of two is (own + (first + second leaf)/2) / 1.5; own and second leaf are drawn anew.
    stddev = 2.0 * 1.5 / 20 * np.sqrt(2 * 1.25) / 1.5
    assert_gaussian(second.result[0] - again.result[0], stddev)


@pytest.mark.slow_after(1)
def test_noise_repeats_neither_for_a_second_run_nor_for_a_second_process(released):
    privacy, process, first, _, _ = released
    tf.keras.utils.set_random_seed(1)
    second_process = privacy.aggregator().create(TYPE)
    for other in (process, second_process):
        result = other.next(other.initialize(), []).result
        assert_independent(first.result[0], result[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVACIES)
def test_noise_does_not_repeat_in_another_python_process(name, tmp_path):
    program = f"""
import sys
import numpy as np, tensorflow as tf, tensorflow_federated as tff
from federated.privacy.user_level import UserLevelPrivacy
from federated.runtime import contexts
tf.keras.utils.set_random_seed(1)
privacy = {PRIVACIES[name]!r}
with contexts.local_context():  # TFF's own would leave its worker behind
    process = privacy.aggregator().create(tff.types.to_type((np.float32, [{SIZE}])))
    np.save(sys.argv[1], process.next(process.initialize(), []).result)
"""
    draws = []
    for k in range(2):
        path = tmp_path / f"{k}.npy"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([sys.executable, "-c", program, str(path)], check=True, **quiet)
        draws.append(np.load(path))
    assert_independent(*draws)


@pytest.mark.slow
def test_large_updates_are_clipped_and_others_averaged_over_the_public_number():
    privacy = UserLevelPrivacy(0.0, 20, 60, clip=2.0)
    process = privacy.aggregator().create(TYPE)
    output = process.next(process.initialize(), [update(1.0), update(1e9), update(-0.5)])
    np.testing.assert_allclose(output.result[1], update(1.0 + 2.0 - 0.5)[1] / 20, rtol=1e-5)
    broken = update(1.0)
    broken[0][7] = np.nan
    output = process.next(output.state, [update(1.0), broken])
    np.testing.assert_allclose(output.result[1], update(1.0)[1] / 20, rtol=1e-5)
    np.testing.assert_array_equal(output.result[0], 0.0)


@pytest.mark.parametrize("clip", [2.0, "adaptive"])
def test_the_number_that_divides_may_be_a_fraction_as_under_poisson_sampling(clip):
    query = UserLevelPrivacy(0.2, 2.5, 60, clip=clip).query(3)
    assert float(query.initial_global_state().denominator) == 2.5


def test_updates_have_to_be_float32():
    aggregator = PRIVACIES["fixed"].aggregator()
    for wrong in [(np.float64, [3]), (np.int32, [3]), (np.float32, [None])]:
        with pytest.raises(TypeError, match="must be float32 tensors of known shapes"):
            aggregator.create(tff.types.to_type(wrong))


def test_an_adaptive_clip_shares_the_noise_with_its_count():
    privacy = UserLevelPrivacy(1.0, 40, 400)
    count = 2 * 0.05 * 40
    assert privacy.value_noise_multiplier**-2 + count**-2 == pytest.approx(1.0, rel=1e-12)
    assert UserLevelPrivacy(0.0, 40, 400).value_noise_multiplier == 0.0
    assert UserLevelPrivacy(1.0, 40, 400, clip=3.0).value_noise_multiplier == 1.0


@pytest.mark.parametrize(("clients", "noise"), [(1, 0.05), (40, 1.0)])
def test_sum_and_count_of_an_adaptive_clip_together_have_the_noise_that_is_stated(clients, noise):
    query = UserLevelPrivacy(noise, clients, 400).query(3)
    nothing = query.initial_sample_state(tf.zeros([3]))
    _, _, event = query.get_noised_result(nothing, query.initial_global_state())
    assert noise < effective_noise_multiplier(event) < noise * (1 + 1e-4)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"noise_multiplier": -1}, ValueError, "`noise_multiplier` must be .* at least 0"),
        ({"noise_multiplier": float("nan")}, ValueError, "`noise_multiplier` must be finite"),
        ({"clients_per_round": 0}, ValueError, "`clients_per_round` must be .* greater than 0"),
        ({"clients_per_round": 101}, ValueError, "must be at most `total_clients`"),
        ({"total_clients": 100.0}, TypeError, "`total_clients` must be a whole number"),
        ({"clip": 0.0}, ValueError, "`clip` must be finite and greater than 0"),
        ({"clip": 1e39}, ValueError, "`clip` must be from 1e-12 to 1e"),
        ({"clip": 1e-40}, ValueError, "`clip` must be from 1e-12 to 1e"),
        ({"initial_clip": 1e13}, ValueError, "`initial_clip` must be from"),
        ({"noise_multiplier": 1e38}, ValueError, "`noise_multiplier` must be from 0 to"),
        ({"clip": "median"}, ValueError, "`clip` must be one of 'adaptive'"),
        ({"clip": None}, TypeError, "`clip` must be a number"),
        ({"initial_clip": 0.0}, ValueError, "`initial_clip` must be"),
        ({"mechanism": "laplace"}, ValueError, "`mechanism` must be one of 'gaussian', 'tree', 'b"),
        ({"clip": "adaptive", "mechanism": "tree"}, ValueError, "Pass a number as `clip`"),
        (
            {"mechanism": "tree", "clients_per_round": 9.5},
            TypeError,
            "`clients_per_round` must be a whole number",
        ),
        ({"clip": "adaptive", "noise_multiplier": 1.0}, ValueError, "below clients_per_round / 10"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, error, message):
    good = {"noise_multiplier": 0.9, "clients_per_round": 10, "total_clients": 100, "clip": 1.0}
    UserLevelPrivacy(**good)
    with pytest.raises(error, match=message):
        UserLevelPrivacy(**{**good, **change})


def test_there_has_to_be_something_to_train():
    with pytest.raises(ValueError, match="The model must have trainable weights"):
        PRIVACIES["fixed"].aggregator().create(tff.types.to_type([]))


def test_numbers_of_numpy_become_those_of_python():
    numbers = {"noise_multiplier": np.float32(0.5), "clients_per_round": np.int64(3)}
    privacy = UserLevelPrivacy(**numbers, total_clients=np.int32(12), clip=np.float64(0.5))
    assert json.loads(json.dumps(dataclasses.asdict(privacy))) == dataclasses.asdict(privacy)
    assert privacy == UserLevelPrivacy(0.5, 3, 12, clip=0.5)


def test_it_is_frozen_and_plain():
    privacy = PRIVACIES["tree"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        privacy.noise_multiplier = 0.1
    assert UserLevelPrivacy(**dataclasses.asdict(privacy)) == privacy
    assert privacy.rounds_per_pass == 3
    assert UserLevelPrivacy(1.0, 7, 20, clip=1.0).rounds_per_pass == 2
