"""State that carries data from one example to another, outside of the path from data to loss."""

from __future__ import annotations

import functools
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import (
    captures,
    function_attributes,
    is_stateful,
    line_of,
    place_of,
    takes_resources,
)
from tf_adaptive_dp._keras.variables import handle_of, local_copies
from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    COMMUNICATION,
    ELEMENTS,
    OUTSIDE,
    RANDOM,
    READERS,
    SHAPE_ONLY,
    WITHOUT_MEMORY,
    holds_sizes,
)
from tf_adaptive_dp.gradients.frames import Frame
from tf_adaptive_dp.gradients.released import is_released

# What Python, files and staging areas remember counts as one state, since no one sees inside.
_WORLD = "world"
_RESOURCE, _OUTSIDE, _FUNCTION = "resource", "outside", "function"

_STATE = (
    "The step writes data of the batch into a variable (or a table, a queue or the like) that "
    "the loss reads{sizes}, so an example would change the gradients of others, in this step or in "
    "later ones. Received: {op} ({type}), {place}{line}. Use a layer without such state "
    "(stateful=False, no moving averages), or freeze it (`layer.trainable = False`); state of your "
    "own may be computed from weights, released gradients and public data only."
)
_SIZES = (
    ", or the size of the batch, which is random (`plan.fit(..., equal_rows=True)` makes it public)"
)
_FOREIGN = (
    "The step passes data of the batch to Python, to a file or to a staging area, and the loss "
    "depends on what comes back from there, so an example may change the gradients of others. "
    "Received: {op} ({type}), {place}{line}. Log with `tf.print` or `tf.summary`, and pass what "
    "the loss needs from Python as an argument of the step."
)


class _Write(NamedTuple):
    """An operation that may write, and what decides whether it runs."""

    frame: Frame
    op: tf.Operation
    decisions: list[tuple[Frame, tf.Tensor]]

    def sources(self) -> list[tuple[Frame, tf.Tensor]]:
        """All that the written state may depend on."""
        values = [t for t in self.op.inputs if t.dtype != tf.resource]
        return [*((self.frame, t) for t in values), *self.decisions]


def refuse_state(loss: tf.Tensor, sizes_are_data: bool = False) -> None:
    """Refuses state that carries data from one example to another.

    Examples are moving averages that a normalization uses itself, the states of a stateful
    recurrent layer, and queues of earlier examples.

    Args:
      loss: the loss as it was given, symbolic: a vector of examples' losses, or a scalar with all
        its terms.
      sizes_are_data: see `refuse_state_within`.

    Raises:
      NotPrivateError: if the loss reads state that its graph, as far as it was built, writes from
        the data, other than from released gradients.
    """
    root = Frame(loss.graph)
    refuse_state_within(root, [(root, loss)], sizes_are_data)


def refuse_state_within(
    root: Frame, losses: Iterable[tuple[Frame, tf.Tensor]], sizes_are_data: bool = False
) -> None:
    """Refuses state that carries data to losses, wherever a function within a graph writes it.

    An operation that takes a handle and data counts as writing unless it is known only to read. So
    does an operation that takes data out of the graph. If the written values depend on state, the
    same is asked of that state.

    Guarantee: no state that is written within `root` carries data to the losses, except by way of
    releases. The search does not see what other functions and Python write.

    Args:
      root: the outermost graph.
      losses: the losses whose gradients are clipped, and what else is computed from these gradients
        before their release, each with its frame in `root`.
      sizes_are_data: whether unknown sizes of the inputs count as data, as a random number of
        examples does.

    Raises:
      NotPrivateError: naming the operation that writes.
    """
    search = _DependencySearch(sizes_are_data=sizes_are_data)
    search.follow(losses, set())
    op = _writes_data(search, _by_state(root), search.read)
    if op is not None:
        raise _error(op, _SIZES if sizes_are_data else "")


def written_from_data(root: Frame, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """The variables that a step writes from data of the batch, other than by a private release.

    Whether the loss reads them does not matter.

    Args:
      root: the outermost graph.
      variables: those to ask about.
    """
    writes = _by_state(root)

    def are_written(several: Iterable[tf.Variable]) -> bool:
        copies = [copy for variable in several for copy in local_copies(variable)]
        states: set[Hashable] = {id(handle_of(copy)) for copy in copies}
        return _writes_data(_DependencySearch(), writes, states) is not None

    variables = list(variables)
    # One search for all of them is enough for almost every step.
    return [v for v in variables if are_written([v])] if are_written(variables) else []


def _writes_data(
    search: _DependencySearch, writes: Mapping[Hashable, list[_Write]], states: set[Hashable]
) -> tf.Operation | None:
    """An operation that writes data into one of some states, or into state that these depend on."""
    clean: set = set()
    pending, known = list(states), set(states)
    while pending:
        for write in writes.get(pending.pop(), ()):
            if search.follow(write.sources(), clean):
                return write.op
        pending += search.read - known
        known |= search.read
    return None


def state_between(functions: Sequence[tf.Graph]) -> tf.Operation | None:
    """Finds what writes data into state that functions read, such as those of a data set's `map`.

    All their arguments are data. What Python and files remember is not among the state, since such
    functions often run Python for each example alone.

    Args:
      functions: their graphs.

    Returns:
      An operation that writes, such as an assignment to a variable.
    """
    roots = [Frame(function) for function in functions]
    captured = {id(inside) for function in functions for _, inside in captures(function)}
    arguments = {id(t) for function in functions for t in function.inputs} - captured
    search = _DependencySearch(arguments)
    search.follow([(root, t) for root in roots for t in root.graph.outputs], set())
    writes: dict[Hashable, list[_Write]] = {}
    for root in roots:
        for state, some in _by_state(root).items():
            # Data sets within functions have handles for their seeds and caches alone.
            own = [write for write in some if "Dataset" not in write.op.type]
            writes.setdefault(state, []).extend(own)
    writes.pop(_WORLD, None)
    return _writes_data(search, writes, search.read)


def data_within(frame: Frame, tensor: tf.Tensor) -> dict[Hashable, tf.Tensor]:
    """The inputs of a step and the elements of data sets that a tensor depends on.

    Args:
      frame: that of the tensor, within the outermost graph.
      tensor: what may depend on data.

    Returns:
      The tensors, by keys that are alike for all searches of the same graph.
    """
    search = _DependencySearch()
    search.follow([(frame, tensor)], set())
    return dict(search.data)


class _DependencySearch:
    """Follows values back to the data and the state that they depend on.

    Attributes:
      read: the state found so far.
      data: the inputs of the step and the elements of data sets found so far, by frame and id.
    """

    def __init__(self, arguments: Container[int] = (), sizes_are_data: bool = False):
        """Takes the ids of arguments that are data, whatever their ranks."""
        self._arguments, self._sizes_are_data = arguments, sizes_are_data
        self.read: set[Hashable] = set()
        self.data: dict[tuple[Frame, int], tf.Tensor] = {}

    def follow(self, starts: Iterable[tuple[Frame, tf.Tensor]], seen: set) -> bool:
        """Whether a tensor depends on data, other than by a private release.

        How large a batch is does not count as data, unless that was asked for; how many entries
        `tf.boolean_mask` leaves of it does.

        Args:
          starts: the tensors to ask about, each with its frame.
          seen: what was followed already; grows.
        """
        stack, found = [(*start, False) for start in starts], False
        while stack:
            frame, tensor, only_sizes = stack.pop()
            if (frame, id(tensor), only_sizes) in seen or is_released(tensor):
                continue
            seen.add((frame, id(tensor), only_sizes))
            asks = not only_sizes or self._has_private_size(tensor)
            if asks and self._is_data(frame, tensor):
                found = True
                self.data[frame, id(tensor)] = tensor
            stack += self._sources(frame, tensor, only_sizes)
        return found

    def _has_private_size(self, tensor: tf.Tensor) -> bool:
        return self._sizes_are_data and not tensor.shape.is_fully_defined()

    def _is_data(self, frame: Frame, tensor: tf.Tensor) -> bool:
        """Whether a tensor is an input of the step or an element of a data set."""
        if tensor.dtype == tf.resource:
            return False
        if tensor.op.type == "Placeholder":
            places, enters_here = frame.origins(tensor)
            return enters_here or (not places and id(tensor) in self._arguments)
        return tensor.op.type in ELEMENTS

    def _sources(
        self, frame: Frame, tensor: tf.Tensor, only_sizes: bool
    ) -> list[tuple[Frame, tf.Tensor, bool]]:
        """What a tensor is computed from; adds the state that it reads to `read`.

        Args:
          frame: that of the tensor.
          tensor: what is computed.
          only_sizes: whether only the sizes of the tensor matter, and not what it holds.

        Returns:
          Tensors, each with its frame and whether only its sizes matter.
        """
        op = tensor.op
        if tensor.dtype == tf.resource:
            self.read |= frame.handles(tensor)
            return []
        if only_sizes and tensor.shape.is_fully_defined():
            return []
        if op.type == "Placeholder":
            places, _ = frame.origins(tensor)
            return [(*place, only_sizes) for place in places]
        if op.type in SHAPE_ONLY:
            return [(frame, t, True) for t in op.inputs]
        if op.type == "OptionalHasValue":  # tells how many batches there are, not what they hold
            return []
        if frame.bodies(op):
            return [(*result, only_sizes) for result in frame.results(tensor)]
        if only_sizes:
            return [] if op.type in ELEMENTS else [(frame, *asked) for asked in holds_sizes(op)]
        if _kind(op.type) == _OUTSIDE:
            self.read.add(_WORLD)
        return [(frame, t, False) for t in op.inputs]


def _by_state(root: Frame) -> dict[Hashable, list[_Write]]:
    """All operations within a graph that may write, grouped by the state they may write to."""
    found: dict[Hashable, list[_Write]] = {}
    pending: list[tuple[Frame, list]] = [(root, [])]
    while pending:
        frame, decisions = pending.pop()
        for op in frame.graph.get_operations():
            kind = _kind(op.type)
            if kind == _FUNCTION:
                bodies = frame.bodies(op).values()
                pending += [(body, [*decisions, *body.decisions()]) for body in bodies]
            if kind is None or (op.outputs and all(map(is_released, op.outputs))):
                continue
            handles = [t for t in op.inputs if t.dtype == tf.resource]
            states = {name for t in handles for name in frame.handles(t)}
            for state in {_WORLD} if kind == _OUTSIDE else states if kind == _RESOURCE else ():
                found.setdefault(state, []).append(_Write(frame, op, decisions))
    return found


@functools.cache
def _kind(op_type: str) -> str | None:
    """The side effects that operations of a type may have; `None` for none."""
    runs_functions, stateful = bool(function_attributes(op_type)), is_stateful(op_type)
    if op_type in OUTSIDE:
        return _OUTSIDE
    if stateful is False:
        return _FUNCTION if runs_functions else None
    if op_type in READERS | WITHOUT_MEMORY | RANDOM or op_type.startswith(COMMUNICATION):
        return None
    if runs_functions:
        return _FUNCTION
    if stateful is None:
        return _OUTSIDE
    if takes_resources(op_type):
        return _RESOURCE
    return None if "Dataset" in op_type else _OUTSIDE


def _error(op: tf.Operation, sizes: str) -> NotPrivateError:
    text = _FOREIGN if _kind(op.type) == _OUTSIDE else _STATE
    found = {"op": op.name, "type": op.type, "place": place_of(op), "line": _line(op)}
    return NotPrivateError(text.format(**found, sizes=sizes))


def _line(op: tf.Operation) -> str:
    """The line of the user's program that made an operation, if it is known."""
    found = line_of(op)
    return "" if found is None else f", line {found[1]} of {found[0]}"
