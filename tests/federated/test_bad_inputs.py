"""Wrong arguments of the federated API: the error names them, before a worker is started."""

import pytest

import federated
from federated import datasets
from tf_adaptive_dp.sampling import FixedSizeSampling

IDS = ["a", "b", "c", "d"]
PRIVACY = federated.UserLevelPrivacy(1.0, 2, 4, clip=1.0)
SAMPLER = federated.ClientSampler
LEDGER = federated.UserLedger
DIGITS, _ = datasets.load_digits(5)
WORDS = datasets.Vocabulary(("a",), ("t",))
COUNTS = datasets.UserCounts({"a": 1}, {"t": 1}, "heldout", ("ada",))


@pytest.mark.parametrize(
    "call, name, value",
    [
        (lambda v: federated.local_context(v), "max_concurrency", "4"),
        (lambda v: federated.local_context(timeout=v), "timeout", "4"),
        (lambda v: federated.remote_context(["ada:1"], timeout=v), "timeout", None),
        (lambda v: federated.train(None, None, None, 3, v), "directory", None),
        (lambda v: federated.monitors(v), "directory", None),
        (lambda v: federated.monitors("run", v), "num_rounds", "4"),
        (lambda v: federated.scalars(v), "metrics", "loss"),
        (lambda v: SAMPLER(v, FixedSizeSampling(2, 3)), "client_ids", None),
        (lambda v: SAMPLER.poisson(v, PRIVACY, 3), "client_ids", 4),
        (lambda v: SAMPLER.poisson(IDS, v, 3), "privacy", None),
        (lambda v: SAMPLER.poisson(IDS, PRIVACY, v), "num_rounds", "4"),
        (lambda v: SAMPLER.poisson(IDS, PRIVACY, 3, max_clients=v), "max_clients", 1.5),
        (lambda v: SAMPLER.fixed_order(IDS, v, 3), "privacy", "banded"),
        (lambda v: SAMPLER.fixed_order(IDS, PRIVACY, v), "num_rounds", None),
        (lambda v: LEDGER(v), "privacy", 1.0),
        (lambda v: LEDGER.from_dict(v, PRIVACY), "plain", "{}"),
        (lambda v: federated.Evaluation(None, lambda i: None, v), "client_ids", 1.5),
        (lambda v: federated.Evaluation(None, lambda i: None, IDS, best=v), "best", 1.5),
        (lambda v: datasets.random_clients(v, 2, 0), "client_ids", None),
        (lambda v: datasets.subset(v, IDS), "client_data", "clients"),
        (lambda v: datasets.random_clients(v, 2, 0), "client_ids", "ab"),
        (lambda v: datasets.subset(DIGITS, v), "client_ids", ["client_1", 2]),
        (lambda v: datasets.client_data([1], [1], v), "partition", [0]),
        (lambda v: datasets.client_data([1], [1], v), "partition", {1: [0]}),
        (lambda v: datasets.client_data(v, [1], {"a": [0]}), "images", "4"),
        (lambda v: datasets.client_data([1], v, {"a": [0]}), "labels", None),
        (lambda v: datasets.load_cifar10(v), "data_dir", 1.5),
        (lambda v: datasets.load_stackoverflow(v), "cache_dir", b"x"),
        (lambda v: datasets.load_counts(v), "cache_dir", ["data"]),
        (lambda v: datasets.Vocabulary(v, ("t",)), "words", None),
        (lambda v: datasets.Vocabulary(("a",), v), "tags", "physics"),
        (lambda v: datasets.UserCounts(v, {}, "heldout", None), "words", ["a"]),
        (lambda v: datasets.UserCounts({}, {}, v, None), "source", None),
        (lambda v: datasets.UserCounts({}, {}, "heldout", v), "users", "ada"),
        (lambda v: COUNTS.require_other_users(v), "private_client_ids", "ada"),
        (lambda v: COUNTS.require_other_users(v), "private_client_ids", [b"ada"]),
        (lambda v: datasets.count_users(v, ["a"]), "client_data", None),
        (lambda v: datasets.count_users(DIGITS, v), "client_ids", "client_1"),
        (lambda v: datasets.count_users(DIGITS, ["client_1"], v), "source", 1.5),
        (lambda v: datasets.in_memory(DIGITS, v), "batches", 4),
        (lambda v: datasets.normalized_images(v), "batches", None),
        (lambda v: datasets.bags_of_words(WORDS, v), "batches", "4"),
    ],
)
def test_wrong_arguments_are_named(call, name, value):
    with pytest.raises(TypeError) as error:
        call(value)
    assert f"`{name}` must be" in str(error.value)
    assert f"Received: {name}={value!r}" in str(error.value)


@pytest.mark.parametrize("rows", [1, "b", [], [[0]], [0.0], [-1], [1]])
def test_rows_that_are_not_there_are_refused_with_their_client(rows):
    with pytest.raises(ValueError, match="`partition` must give each client.*Received: 'a': "):
        datasets.client_data([5], [1], {"a": rows})
    with pytest.raises(ValueError, match="`partition` must have at least one client"):
        datasets.client_data([5], [1], {})
