"""What the models of a search share, such as the random numbers of a layer that all of them have.

A layer made outside of `build_model` is a part of every model. What it holds, and what
`model.export()` writes of it, would show how many candidates there were.
"""

from __future__ import annotations

import weakref

import tensorflow as tf

from tf_adaptive_dp._keras.layers import variables_so_far
from tf_adaptive_dp._keras.variables import native
from tf_adaptive_dp.accounting.earlier_releases import were_trained_privately
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.validation.repeatable import state_of


class SharedState:
    """Lets every model of a search begin with the same values in the variables that they share.

    Guarantee: if all candidates were passed to `begin_with` before the first one was trained, a
    model that `begin_with` returns from has in each variable that an earlier one has too the value
    of before the search; so have all these variables after `restore`. This covers the states of
    random layers. It does not cover what `build_model` shares in other ways, such as a counter of
    its calls, nor variables that a layer makes only in training.
    """

    def __init__(self) -> None:
        # Weakly, or no candidate's memory would be freed.
        self._seen: dict[int, weakref.ref[tf.Variable]] = {}
        self._shared: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def begin_with(self, model: tf.keras.Model) -> None:
        """Restores what a model shares with earlier ones.

        Args:
          model: as `build_model` made it.

        Raises:
          NotPrivateError: if it would train weights of an earlier model, or weights that were
            trained privately before.
        """
        trained = {id(native(v)) for v in variables_so_far(model, trained=True)}
        for variable in map(native, state_of(model)):
            key = id(variable)
            is_known = self._seen.get(key, lambda: None)() is variable
            if key in trained and (is_known or were_trained_privately([variable])):
                raise NotPrivateError(
                    "Every candidate must train variables of its own: only the winner is released, "
                    "and a layer that was made outside of `build_model` would bring the training "
                    "of other candidates into it. Make all layers that are trained in "
                    "`build_model`, and load weights from a file. Nothing was trained with this "
                    f"model. Received: variable {variable.name!r}, which other models have, too"
                )
            if not is_known:
                self._seen[key] = weakref.ref(variable)
            elif key not in self._shared:
                self._shared[key] = variable, tf.identity(variable)
        self.restore()

    def restore(self) -> None:
        """Gives all shared variables the values that they had at first."""
        for variable, value in self._shared.values():
            variable.assign(value)
