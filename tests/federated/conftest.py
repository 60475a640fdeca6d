"""What tests of `federated` share: one TFF worker a test process, which ends with it."""

import pytest

from federated import runtime


@pytest.fixture(scope="session")
def context():
    with runtime.local_context() as made:
        yield made
