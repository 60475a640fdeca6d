"""Functions within functions: which graphs an operation runs, and where their inputs come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import tensorflow as tf

from tf_adaptive_dp._keras import graphs
from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, DATA_SET_LOOPS, LOOPS


class Frame:
    """The body of a function where one operation runs it, or the outermost graph.

    One function that two operations run has two frames.

    Attributes:
      graph: the body.
      call: the operation that runs it; `None` for the outermost graph of the search.
      outer: the frame that contains that operation.
      role: which of the bodies of that operation it is, as `graphs.bodies` names them.
    """

    def __init__(
        self,
        graph: tf.Graph,
        call: tf.Operation | None = None,
        outer: Frame | None = None,
        role: str = "",
    ):
        self.graph, self.call, self.outer, self.role = graph, call, outer, role
        self._bodies: dict[tf.Operation, dict[str, Frame]] = {}
        self._captured = {id(t): outside for outside, t in graphs.captures(graph)}
        self._places = {} if call is None else {id(t): k for k, t in enumerate(graph.inputs)}
        self._outside: dict[int, Frame] = {}

    def bodies(self, op: tf.Operation) -> dict[str, Frame]:
        """The bodies that an operation of this graph may run, by role (see `graphs.bodies`)."""
        if op not in self._bodies and graphs.function_attributes(op.type):
            found = graphs.bodies(op)
            self._bodies[op] = {role: Frame(g, op, self, role) for role, g in found.items()}
        return self._bodies.get(op, {})

    def all_within(self) -> Iterator[Frame]:
        """Yields this frame and those of all bodies that it runs, at any depth."""
        yield self
        for op in self.graph.get_operations():
            for body in self.bodies(op).values():
                yield from body.all_within()

    def origins(self, tensor: tf.Tensor) -> tuple[list[tuple[Frame, tf.Tensor]], bool]:
        """Finds where an input of this body comes from.

        Args:
          tensor: a placeholder of the graph.

        Returns:
          The tensors that may be passed to it, each with its frame, and whether data enters here.
          That is so for arguments of the outermost function, except for scalars, which count as
          settings, and for elements of a data set.
        """
        call, outer = self.call, self.outer
        if call is None or outer is None:
            if id(tensor) not in self._captured:
                opaque = tensor.dtype in (tf.resource, tf.variant)
                return [], not opaque and tensor.shape.rank != 0
            outside = self._captured[id(tensor)]
            if graphs.is_symbolic(outside):
                return [(self._frame_outside(outside.graph), outside)], False
            return [], False
        place, inputs = self._places.get(id(tensor)), call.inputs
        if place is None:
            return [(outer, t) for t in inputs], False
        if call.type in CALLS:
            return [(outer, inputs[place])], False
        if call.type in BRANCHES:
            return [(outer, inputs[place + 1])], False
        if call.type in LOOPS:
            body = outer.bodies(call)["body"]
            return [(outer, inputs[place]), (body, body.graph.outputs[place])], False
        if call.type in DATA_SET_LOOPS:
            return self._origins_in_data_set_loop(place, call, outer)
        return [(outer, t) for t in inputs], "Dataset" in call.type

    def _origins_in_data_set_loop(
        self, place: int, call: tf.Operation, outer: Frame
    ) -> tuple[list[tuple[Frame, tf.Tensor]], bool]:
        num_states = len(call.get_attr("Tstate"))
        num_others = len(call.get_attr("Targuments"))
        if place < num_states:
            after = (self, self.graph.outputs[place])
            return [(outer, call.inputs[1 + place]), after], False
        if place < len(self.graph.inputs) - num_others:
            return [(outer, call.inputs[0])], True
        other = place - (len(self.graph.inputs) - num_others)
        return [(outer, call.inputs[1 + num_states + other])], False

    def results(self, tensor: tf.Tensor) -> list[tuple[Frame, tf.Tensor]]:
        """What an output of an operation that runs bodies is computed from, decisions included."""
        op, k = tensor.op, tensor.value_index
        bodies = self.bodies(op)
        if op.type in CALLS:
            return [(b, b.graph.outputs[k]) for b in bodies.values()]
        if op.type in BRANCHES:
            return [(self, op.inputs[0]), *((b, b.graph.outputs[k]) for b in bodies.values())]
        if op.type in LOOPS:
            body, condition = bodies["body"], bodies["cond"]
            return [
                (self, op.inputs[k]),
                (body, body.graph.outputs[k]),
                (condition, condition.graph.outputs[0]),
            ]
        found = [(self, t) for t in op.inputs]
        return found + [(b, t) for b in bodies.values() for t in b.graph.outputs]

    def decisions(self) -> list[tuple[Frame, tf.Tensor]]:
        """The tensors that decide whether and how often the operation runs this body."""
        call, outer = self.call, self.outer
        if call is None or outer is None:
            return []
        if call.type in BRANCHES:
            return [(outer, call.inputs[0])]
        if call.type in LOOPS:
            condition = outer.bodies(call)["cond"]
            return [(condition, condition.graph.outputs[0])]
        return []

    def handles(self, tensor: tf.Tensor) -> set[Hashable]:
        """Identifies the resources that a handle may refer to, alike in all frames."""
        found: set[Hashable] = set()
        seen: set[tuple[Frame, int]] = set()
        stack = [(self, tensor)]
        while stack:
            frame, tensor = stack.pop()
            if (frame, id(tensor)) in seen:
                continue
            seen.add((frame, id(tensor)))
            op = tensor.op
            if op.type == "Placeholder":
                places, _ = frame.origins(tensor)
                stack += places
                if not places:
                    found.add(id(frame._captured.get(id(tensor), tensor)))
            elif frame.bodies(op):
                stack += [(f, t) for f, t in frame.results(tensor) if t.dtype == tf.resource]
            elif op.type in ("Identity", "IdentityN", "StopGradient"):
                stack += [(frame, t) for t in op.inputs if t.dtype == tf.resource]
            else:
                shared = op.node_def.attr["shared_name"].s
                found.add((op.node_def.attr["container"].s, shared) if shared else id(op))
        return found

    def _frame_outside(self, graph: tf.Graph) -> Frame:
        if id(graph) not in self._outside:
            self._outside[id(graph)] = Frame(graph)
        return self._outside[id(graph)]


def handles_read(tensor: tf.Tensor) -> set[Hashable]:
    """The resources that a tensor is computed from, as `Frame.handles` names them.

    Args:
      tensor: any tensor; of an eager one nothing is known.
    """
    if not graphs.is_symbolic(tensor):
        return set()
    frame = Frame(tensor.graph)
    inputs = {id(t): t for op in graphs.ancestors([tensor]) for t in op.inputs}
    return {name for t in inputs.values() if t.dtype == tf.resource for name in frame.handles(t)}
