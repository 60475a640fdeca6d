"""Follows the batch axis through a graph, and finds what mixes the examples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.gradients.graph import ancestors, layer_name
from tf_adaptive_dp.gradients.layout import (  # noqa: F401
    functions,
    gathers,
    inner_gradients,
    lists,
    operations,
    products,
    reshaping,
)
from tf_adaptive_dp.gradients.layout.batch_axis import (
    BatchAxis,
    Mixed,
    OneExample,
    Public,
    Rows,
)
from tf_adaptive_dp.gradients.layout.custom_gradients import refuse_custom_gradients
from tf_adaptive_dp.gradients.layout.names import ELEMENTS, ELEMENTWISE, KEEP_SHAPE, SHAPE_ONLY
from tf_adaptive_dp.gradients.layout.sizes import ONE, Size, evaluate, product, static_value
from tf_adaptive_dp.gradients.released import is_released

_NUMBERS = itertools.count()
_SOURCES = ("Placeholder", *sorted(ELEMENTS))
_OPAQUE_TYPES = (tf.resource, tf.variant)
_FOREIGN = "does not have the batch as axis 0, has no static shape, or is sparse or ragged"


class Layouts:
    """Where the batch axis of each tensor is.

    Two things are kept for a tensor: its layout (a `BatchAxis`, `Mixed`, or `None` for no batch
    axis), and whether its values depend on the data. A tensor that depends on the data and has no
    batch axis is always `Mixed`: it is one number, or one tensor, for all examples. In a loop over
    the examples of the batch there are two more layouts, `Rows` and `OneExample`.

    Attributes:
      batch_size: B, known or as an unknown.
      loops: the bodies of loops that this graph is in.
      number: tells these layouts from those of another call of the same function.
      caller: of the body of a function: the layouts of the graph that calls it, and the operation.
      custom_gradients: what gradients of the user's own (`tf.custom_gradient`) return.
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
        self.caller: tuple[Layouts, tf.Operation] | None = None
        self.custom_gradients: list[tf.Tensor] = []
        self._bodies: dict[tf.Operation, dict[str, tuple[tf.Graph, Layouts]]] = {}

    def __getitem__(self, tensor: tf.Tensor) -> BatchAxis | Mixed | None:
        return self._layouts.get(tensor.ref())

    def depends(self, tensor: tf.Tensor) -> bool:
        """Whether the values of a tensor depend on the data of the batch."""
        return tensor.ref() in self._dependent

    def tied(self, tensor: tf.Tensor) -> frozenset[tf.Graph]:
        """Bodies of loops from iteration to iteration of which a public tensor changes."""
        return self._tied.get(tensor.ref(), frozenset())

    def example_at(self, index: tf.Tensor) -> OneExample | None:
        """What belongs to the example of that number, if it counts the examples in a loop."""
        found = self._origin(index)
        return OneExample(found) if found in self._counters else None

    def _origin(self, index: tf.Tensor):
        """What an argument of a function stands for in the graphs outside of it."""
        while index.op.type == "Identity":
            index = index.op.inputs[0]
        return self._indices.get(index.ref(), index.ref())

    def set(self, tensor: tf.Tensor, layout: BatchAxis | Mixed | None, dependent: bool) -> None:
        """Enters a tensor; a value of the data without a batch axis must be `Mixed`."""
        if dependent:
            self._dependent.add(tensor.ref())
        if layout is not None:
            self._layouts[tensor.ref()] = layout

    def size(self, tensor: tf.Tensor, axis: int) -> Size:
        """The size of an axis, in terms of the batch size and of unknowns."""
        static, layout = tensor.shape[axis], self[tensor]
        if static is not None:
            return Size(static)
        if isinstance(layout, BatchAxis) and layout.axis == axis:
            return product([self.batch_size, layout.outer, layout.inner])
        op = tensor.op
        if op.type == "Transpose":
            order = static_value(op.inputs[1])
            if order is not None:
                return self.size(op.inputs[0], int(order[axis]))
        if op.type == "Reshape":
            found = self._reshaped(op)[axis]
            if found is not None:
                return found
        if op.type == "Einsum":
            terms, result = products.product_terms(op)
            for source, term in zip(op.inputs, terms):
                if result[axis] in term:
                    return self.size(source, term.index(result[axis]))
        if op.type in ELEMENTWISE | KEEP_SHAPE:
            inputs = op.inputs if op.type in ELEMENTWISE else op.inputs[:1]
            ranks = [t.shape.rank for t in inputs]
            if None not in ranks:
                places = [(t, axis + r - tensor.shape.rank) for t, r in zip(inputs, ranks)]
                found = {self.size(t, a) for t, a in places if a >= 0 and t.shape[a] != 1}
                if len(found) == 1:  # else one of them may be 1, and broadcast
                    return found.pop()
        return Size(1, (f"{self.number}:{tensor.name}[{axis}]",))

    def _reshaped(self, op: tf.Operation) -> list[Size | None]:
        """The shape that a reshape makes: an axis of length -1 takes what the others leave."""
        entries, source = self.entries(op.inputs[1]), op.inputs[0]
        if entries.count(None) == 1 and source.shape.rank is not None:
            total = product(self.size(source, a) for a in range(source.shape.rank))
            known = product(size for size in entries if size is not None)
            entries[entries.index(None)] = total.over(known)
        return entries

    def entries(self, shape: tf.Tensor) -> list[Size | None]:
        """The entries of a shape tensor."""
        return evaluate(shape, self.size)

    def in_target(self, target: Sequence[Size | None]) -> BatchAxis | None:
        """The axis of a shape that was built from the batch size, as in `tf.fill([B, 3], 0.0)`."""
        for axis, size in enumerate(target):
            if size is not None and "batch" in size.unknowns:
                inner = size.over(self.batch_size)
                return None if inner is None else BatchAxis(axis, ONE, inner)
        return None

    def of_function(
        self,
        graph: tf.Graph,
        arguments: Sequence[BatchAxis | Mixed | Rows | OneExample | Public],
        call: tf.Operation,
        role: str,
        given: Sequence[tf.Tensor | None] = (),
        counters: Sequence[tf.Tensor] = (),
        is_loop: bool = False,
    ) -> list:
        """The layouts of the outputs of a function, `Public` where they do not depend on the data.

        Args:
          graph: its body.
          arguments: those of its arguments.
          call: the operation that runs it.
          role: which of the functions of that operation it is.
          given: tensors of this graph that its arguments are, whenever it runs.
          counters: those of its arguments that count the examples of the batch.
          is_loop: whether it is the body of a loop.
        """
        inside = Layouts(self.batch_size.static)
        inside.caller = self, call
        self._bodies.setdefault(call, {})[role] = graph, inside
        inside.loops = self.loops | {graph} if is_loop else self.loops
        inside._counters = self._counters | {t.ref() for t in counters}
        for tensor, outer in zip(graph.inputs, given):
            if outer is not None:
                inside._indices[tensor.ref()] = self._origin(outer)
        for tensor, argument in zip(graph.inputs, arguments):
            public = isinstance(argument, Public)
            inside.set(tensor, argument.layout if public else argument, not public)
            if public:
                inside.tie(tensor, argument.tied)
        ops = ancestors(graph.outputs)
        inside.run(ops)
        with graph.as_default():
            refuse_custom_gradients(ops, inside)
        return [inside._leaving(t) for t in graph.outputs]

    def bodies_of(self, call: tf.Operation) -> dict[str, tuple[tf.Graph, Layouts]]:
        """The bodies of an operation by their roles, with the layouts found in them last."""
        return self._bodies.get(call, {})

    def _leaving(self, tensor: tf.Tensor):
        """The value of an output; the number of an example is known inside of a function only."""
        value = self.value(tensor)
        if isinstance(value, OneExample) and value.loop is tensor.graph:
            return Mixed(tensor.op, "takes what belongs to one example out of its iteration")
        return value

    def tie(self, tensor: tf.Tensor, loops: frozenset[tf.Graph]) -> None:
        """Enters that a public tensor changes from iteration to iteration of loops."""
        if loops:
            self._tied[tensor.ref()] = loops

    def value(self, tensor: tf.Tensor) -> BatchAxis | Mixed | Rows | OneExample | Public:
        """The layout of a tensor, as `Public` if it does not depend on the data."""
        if self.depends(tensor):
            return self[tensor]
        return Public(self[tensor], self.tied(tensor))

    def run(self, ops: Iterable[tf.Operation]) -> None:
        """Enters the outputs of operations, given in the order of creation."""
        for op in ops:
            if any(self[t] is not None or self.depends(t) for t in op.outputs):
                continue  # a source
            operations.apply(op, self)


def feeds(ops: Iterable[tf.Operation], graph: tf.Graph) -> list[tf.Tensor]:
    """The tensors of data that the graph is fed, other than scalar arguments.

    What it captures from an outer function is data if that is; what it captures from outside of all
    functions is constant. Of a data set's elements all is data: a scalar may have been computed
    from the batch, and a sparse or ragged batch is a `variant`.
    """
    captured = {internal.ref(): external for external, internal in getattr(graph, "captures", ())}

    def is_data(tensor: tf.Tensor, of_element: bool) -> bool:
        if tensor.ref() in captured:
            return tensor.dtype not in _OPAQUE_TYPES and comes_from_data(captured[tensor.ref()])
        if of_element:
            return tensor.dtype != tf.resource
        return tensor.dtype not in _OPAQUE_TYPES and tensor.shape.rank != 0

    found = []
    for op in ops:
        of_element = is_element(op)
        if of_element or op.type == "Placeholder":
            found += [t for t in op.outputs if is_data(t, of_element)]
    return found


def comes_from_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from what a function is fed, other than by a private release."""
    if not hasattr(tensor, "op") or not isinstance(tensor, tf.Tensor) or _is_eager(tensor):
        return False
    seen, stack = set(), [tensor]
    while stack:
        tensor = stack.pop()
        if tensor.ref() in seen or is_released(tensor):
            continue
        seen.add(tensor.ref())
        if tensor.op.type in SHAPE_ONLY:
            continue
        if feeds([tensor.op], tensor.graph):
            return True
        stack += tensor.op.inputs
    return False


def _takes_an_element(op: tf.Operation) -> bool:
    """Whether it takes a batch of a distributed data set, or an empty one after the last."""
    return op.type in ("If", "StatelessIf") and any(map(_is_next, op.inputs))


def _is_next(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "IteratorGetNextAsOptional"


def _computes_more(op: tf.Operation) -> bool:
    """Whether it takes an element and other data, so that the two may mix in it."""
    return _takes_an_element(op) and any(
        comes_from_data(t) for t in op.inputs if not _is_next(t) and t.dtype != tf.resource
    )


def is_element(op: tf.Operation) -> bool:
    """Whether it gives an element of a data set, not an optional that the step filled itself."""
    if op.type == "OptionalGetValue":
        return all(o.type != "OptionalFromValue" for o in ancestors(op.inputs))
    return op.type in ELEMENTS or _takes_an_element(op)


def _is_eager(tensor: tf.Tensor) -> bool:
    return hasattr(tensor, "numpy")


def _axis_0(tensor: tf.Tensor) -> int | None:
    return tensor.shape[0] if tensor.shape.rank else None


def analyze(loss: tf.Tensor) -> Layouts | None:
    """Finds the batch axis of everything that a loss vector is computed from.

    What the step is fed (arguments of the `tf.function`, elements of a data set) is taken as data
    with the batch as axis 0, scalar arguments as settings. What it captures from outside is taken
    as public constants, unless nothing else is there.

    Args:
      loss: [B], symbolic.

    Returns:
      The layouts; the loss itself has an ordinary batch axis. `None` for a batch of one example,
      in which nothing can mix.

    Raises:
      NotPrivateError: if entry i of the loss may depend on more than example i, naming the
        operation that mixes examples, its layer and the cure.
    """
    prepared = prepare(loss)
    if prepared is None:
        return None
    layouts, ops = prepared
    layouts.run(ops)
    refuse(loss, layouts)
    return layouts


def prepare(loss: tf.Tensor) -> tuple[Layouts, list[tf.Operation]] | None:
    """The layouts of what the step is fed, and the operations from there to the loss.

    Args:
      loss: [B], symbolic.

    Returns:
      `None` for a batch of one example.
    """
    layouts, ops, is_one = _sources_entered(loss)
    return None if is_one else (layouts, ops)


def of_one_example(loss: tf.Tensor) -> Layouts:
    """What the loss of a batch of one example is computed from, of which nothing is refused."""
    layouts, ops, _ = _sources_entered(loss)
    layouts.run(ops)
    return layouts


def _sources_entered(loss: tf.Tensor) -> tuple[Layouts, list[tf.Operation], bool]:
    ops = ancestors([loss])
    sources = feeds(ops, loss.graph)
    if not sources:
        sources = [
            t
            for op in ops
            if op.type in (*_SOURCES, "Const")
            for t in op.outputs
            if t.dtype not in _OPAQUE_TYPES and t.shape.rank and t.shape[0] == loss.shape[0]
        ]
    sizes = [_axis_0(t) for t in sources if t.shape.rank != 0]
    size = next((n for n in (loss.shape[0], *sizes) if n is not None), None)
    # A size that is known of the loss alone proves nothing about the data.
    known = None if None in sizes else size
    layouts = Layouts(known)
    for tensor in sources:
        fits = tensor.shape.rank and tensor.shape[0] in (None, size)
        fits = fits and not _computes_more(tensor.op)
        layouts.set(tensor, BatchAxis() if fits else Mixed(tensor.op, _FOREIGN), dependent=True)
    return layouts, ops, known == 1 and set(sizes) == {1}


def refuse(loss: tf.Tensor, layouts: Layouts) -> None:
    """Raises an error unless entry i of the loss belongs to example i."""
    layout = layouts[loss]
    if not layouts.depends(loss):
        raise NotPrivateError(
            "The loss does not depend on anything that the step is fed, so the library cannot "
            f"tell the examples apart. Received: {loss.name}. Pass the batch to the `tf.function` "
            "as arguments, or read it from a data set."
        )
    if isinstance(layout, Mixed):
        raise NotPrivateError(
            "The examples of a batch mix, so none has a gradient of its own. Received: "
            f"{layout.op.name} ({layout.op.type}), which {layout.why}. Layer: "
            f"{layer_name(layout.op)!r}. If this is batch normalization, replace it by "
            "`tf.keras.layers.GroupNormalization` or `LayerNormalization`, or freeze it "
            "(`layer.trainable = False`); otherwise keep the batch as an axis of its own."
        )
    if layout != BatchAxis():
        raise NotPrivateError(
            "The entries of the loss are not the examples of the batch. Received: a loss vector "
            f"{loss.name} that is laid out as {layout}. Return one entry an example, in their "
            "order."
        )
