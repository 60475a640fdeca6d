"""What is known about each tensor of a graph: the state that the rules read and write."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import TensorReference, behind_identities, static_value
from tf_adaptive_dp.gradients.batch_axis.operation_types import (
    ELEMENTWISE,
    KEEP_SHAPE,
    broadcast_terms,
    product_terms,
)
from tf_adaptive_dp.gradients.batch_axis.sizes import ONE, Entries, Size, evaluate, product
from tf_adaptive_dp.gradients.batch_axis.values import (
    BatchAxis,
    DataIndependent,
    Layout,
    OneExample,
    Value,
)

_NUMBERS = itertools.count()


class BatchAxes:
    """The batch axis of each tensor of a graph.

    It records two things about a tensor: its layout (a `BatchAxis`, a `CrossExample`, or `None` for
    no batch axis), and whether its values depend on the data. A tensor that depends on the data and
    has no batch axis is always `CrossExample`: it is one value for all examples. Loops over the
    examples of the batch have two more layouts, `Rows` and `OneExample`.

    Attributes:
      batch_size: B, a number or an unknown.
      loops: the loop bodies around this graph.
      number: identifies one call of a function, since several calls share its tensors.
      caller: for the body of a function, the batch axes of the graph that calls it, and the
        operation.
      custom_gradients: the results of custom gradients (`tf.custom_gradient`).
      trials: the operations made to search them; others like these will run in their place.
    """

    def __init__(self, batch_size: int | None):
        self.batch_size = Size(1, ("batch",)) if batch_size is None else Size(batch_size)
        self._layouts: dict = {}
        self._dependent: set = set()
        self._tied: dict = {}
        self._indices: dict = {}
        self._counters: set = set()
        self.loops: frozenset[tf.Graph] = frozenset()
        # Two calls of one function have tensors of one name, and sizes of their own.
        self.number = next(_NUMBERS)
        self.caller: tuple[BatchAxes, tf.Operation] | None = None
        self.custom_gradients: list[tf.Tensor] = []
        self.trials: set[tf.Operation] = set()
        self._bodies: dict[tf.Operation, dict[str, tuple[tf.Graph, BatchAxes]]] = {}

    def __getitem__(self, tensor: tf.Tensor) -> Layout:
        return self._layouts.get(tensor.ref())

    def axis_of(self, tensor: tf.Tensor) -> BatchAxis:
        """The batch axis of a tensor that has one.

        Raises:
          ValueError: if it has none.
        """
        layout = self[tensor]
        if not isinstance(layout, BatchAxis):
            raise ValueError(f"`tensor` must have a batch axis. Received: {tensor} with {layout}.")
        return layout

    def depends(self, tensor: tf.Tensor) -> bool:
        """Whether the values of a tensor depend on the data of the batch."""
        return tensor.ref() in self._dependent

    def tied(self, tensor: tf.Tensor) -> frozenset[tf.Graph]:
        """The loop bodies from whose iteration to iteration a public tensor changes."""
        return self._tied.get(tensor.ref(), frozenset())

    def example_at(self, index: tf.Tensor) -> OneExample | None:
        """The layout of what belongs to example `index`, if that counts the examples in a loop."""
        found = self._origin(index)
        return OneExample(found) if found in self._counters else None

    def _origin(self, index: tf.Tensor) -> TensorReference:
        """The tensor outside of the function that an argument stands for."""
        index = behind_identities(index)
        return self._indices.get(index.ref(), index.ref())

    def set(self, tensor: tf.Tensor, layout: Layout, dependent: bool) -> None:
        """Records a tensor.

        Args:
          tensor: what was computed.
          layout: where its examples are; not `None` if it depends on the data.
          dependent: whether its values depend on the data of the batch.
        """
        if dependent:
            self._dependent.add(tensor.ref())
        if layout is not None:
            self._layouts[tensor.ref()] = layout

    def size(self, tensor: tf.Tensor, axis: int) -> Size:
        """The size of an axis, in terms of the batch size and other unknowns."""
        static, layout = tensor.shape[axis], self[tensor]
        if static is not None:
            return Size(static)
        if isinstance(layout, BatchAxis) and layout.axis == axis:
            return product([self.batch_size, layout.outer, layout.inner])
        op = tensor.op
        if op.type == "SparseToDense" and isinstance(layout, BatchAxis):
            return Size(1)  # a column of crossed features, see `ragged.to_dense`
        if op.type == "Transpose":
            order = static_value(op.inputs[1])
            if order is not None:
                return self.size(op.inputs[0], int(order[axis]))
        if op.type == "Reshape":
            reshaped = self._reshaped(op)[axis]
            if reshaped is not None:
                return reshaped
        if op.type == "Einsum":
            terms, result = product_terms(op)
            letter = result[axis]
            named = zip(op.inputs, terms)
            places = [(t, term.index(letter)) for t, term in named if letter in term]
            if letter not in broadcast_terms(op):
                places = places[:1]  # the others are as long
            found = self._broadcast(places)
            if found is not None:
                return found
        if op.type in ELEMENTWISE | KEEP_SHAPE:
            inputs = op.inputs if op.type in ELEMENTWISE else op.inputs[:1]
            ranks = [t.shape.rank for t in inputs]
            if None not in ranks:
                places = [(t, axis + r - tensor.shape.rank) for t, r in zip(inputs, ranks)]
                found = self._broadcast([(t, a) for t, a in places if a >= 0])
                if found is not None:
                    return found
        return Size(1, (f"{self.number}:{tensor.name}[{axis}]",))

    def _broadcast(self, places: Sequence[tuple[tf.Tensor, int]]) -> Size | None:
        """The size to which axes are broadcast; `None` if one of several may turn out to be 1."""
        found = {self.size(t, a) for t, a in places if t.shape[a] != 1}
        return found.pop() if len(found) == 1 else None

    def num_entries(self, tensor: tf.Tensor) -> Size:
        """The number of entries of a tensor of known rank."""
        return product(self.size(tensor, a) for a in range(tensor.shape.rank))

    def _reshaped(self, op: tf.Operation) -> Entries:
        """The shape after a reshape, with the length of an axis -1 computed from the others."""
        entries, source = self.entries(op.inputs[1]), op.inputs[0]
        if entries.count(None) == 1 and source.shape.rank is not None:
            total = self.num_entries(source)
            known = product(size for size in entries if size is not None)
            entries[entries.index(None)] = total.over(known)
        return entries

    def entries(self, shape: tf.Tensor) -> Entries:
        """The entries of a shape tensor."""
        return evaluate(shape, self.size)

    def in_target(self, target: Sequence[Size | None]) -> BatchAxis | None:
        """The batch axis of a shape that contains the batch size, as in `tf.fill([B, 3], 0.0)`."""
        for axis, size in enumerate(target):
            if size is not None and "batch" in size.unknowns:
                inner = size.over(self.batch_size)
                return None if inner is None else BatchAxis(axis, ONE, inner)
        return None

    def inside(
        self,
        graph: tf.Graph,
        arguments: Sequence[Value],
        given: Sequence[tf.Tensor | None] = (),
        counters: Sequence[tf.Tensor] = (),
        is_loop: bool = False,
    ) -> BatchAxes:
        """Makes the batch axes of a function's body, and records its arguments.

        Args:
          graph: the body.
          arguments: the layouts of its arguments; `DataIndependent` for those without data.
          given: for each argument, the tensor of this graph that it equals whenever the body runs,
            or `None`.
          counters: the arguments that count the examples of the batch.
          is_loop: whether it is the body of a loop.
        """
        inside = BatchAxes(self.batch_size.static)
        inside.loops = self.loops | {graph} if is_loop else self.loops
        inside._counters = self._counters | {t.ref() for t in counters}
        for tensor, outer in zip(graph.inputs, given):
            if outer is not None:
                inside._indices[tensor.ref()] = self._origin(outer)
        for tensor, argument in zip(graph.inputs, arguments):
            if isinstance(argument, DataIndependent):
                inside.set(tensor, argument.layout, False)
                inside.tie(tensor, argument.tied)
            else:
                inside.set(tensor, argument, True)
        return inside

    def remember(self, call: tf.Operation, role: str, graph: tf.Graph, inside: BatchAxes) -> None:
        """Records the batch axes of a body that an operation of this graph runs.

        Args:
          call: the operation.
          role: what the body is to it, such as a branch or the condition of a loop.
          graph: the body.
          inside: the batch axes found in it.
        """
        inside.caller = self, call
        self._bodies.setdefault(call, {})[role] = graph, inside

    def bodies_of(self, call: tf.Operation) -> dict[str, tuple[tf.Graph, BatchAxes]]:
        """The bodies of an operation by role, with the batch axes found last."""
        return self._bodies.get(call, {})

    def tie(self, tensor: tf.Tensor, loops: frozenset[tf.Graph]) -> None:
        """Records that a public tensor changes from iteration to iteration of loops."""
        if loops:
            self._tied[tensor.ref()] = loops

    def value(self, tensor: tf.Tensor) -> Value:
        """The layout of a tensor, as `DataIndependent` if it does not depend on the data."""
        if self.depends(tensor):
            return self[tensor]
        return DataIndependent(self[tensor], self.tied(tensor))
