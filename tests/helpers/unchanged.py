"""A wrong call must raise the right error and leave everything as it was."""

import numpy as np
import pytest


def snapshot(model):
    """All of the state of a model and its optimizer: weights, variables, ledger, configuration."""
    optimizer = model.optimizer
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "variables": [(v.name, v.numpy().tolist()) for v in optimizer.variables],
        "config": repr(optimizer.get_config()),  # hyperparameters, and the ledger
        "next": optimizer.next_release(),
        "parts": optimizer.unfinished_parts,
    }


def assert_refused(model, call, error, match):
    """Makes the call, and compares the state before and after."""
    if model.built:
        model.optimizer.build(model.trainable_variables)  # slots of zeros are no change
    before = snapshot(model)
    with pytest.raises(error, match=match):
        call()
    for name, value in snapshot(model).items():
        np.testing.assert_equal(value, before[name], err_msg=name)
