"""Wrong arguments of the federated API: the error names them, before a worker is started."""

import pytest

import federated
from federated import datasets
from tf_adaptive_dp.sampling import FixedSizeSampling

IDS = ["a", "b", "c", "d"]
PRIVACY = federated.UserLevelPrivacy(1.0, 2, 4, clip=1.0)
SAMPLER = federated.ClientSampler
LEDGER = federated.UserLedger


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
        (lambda v: datasets.client_data([1], [1], v), "partition", [0]),
    ],
)
def test_wrong_arguments_are_named(call, name, value):
    with pytest.raises(TypeError) as error:
        call(value)
    assert f"`{name}` must be" in str(error.value)
    assert f"Received: {name}={value!r}" in str(error.value)
