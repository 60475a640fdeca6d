"""Reading and editing TensorFlow graphs: functions, captures, operations."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.framework import config, op_def_registry, smart_cond
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import control_flow_util_v2, custom_gradient, resource_variable_ops
from tensorflow.python.util import object_identity

from tf_adaptive_dp._keras.generation import GENERATION, PACKAGE

# Operations that run functions.
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
LOOPS = frozenset({"While", "StatelessWhile"})
# Loops over a data set: a state and an element go in, the state comes out.
DATA_SET_LOOPS = frozenset({"ReduceDataset", "ScanDataset", "ExperimentalScanDataset"})

_COMPOSITES = (tf.SparseTensorSpec, tf.RaggedTensorSpec, tf.IndexedSlicesSpec)
# Scopes of TensorFlow's functions in layers, and the number of a scope.
_OF_FUNCTIONS = re.compile(r"(moments|batchnorm)(_\d+)?")
_NUMBER = re.compile(r"_\d+$")
# The folders of TensorFlow, Keras and this library, with the separator at the end.
_NOT_OF_USERS = tuple(
    os.path.join(os.path.dirname(str(importlib.import_module(name).__file__)), "")
    for name in ("tensorflow", PACKAGE, __name__.partition(".")[0])
)
# What `tensor.ref()` returns.
TensorReference = object_identity.Reference


def is_symbolic(tensor: object) -> bool:
    """Whether a value is a tensor of a graph, and not an eager one."""
    return isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")


def outer_graph(graph: tf.Graph) -> tf.Graph | None:
    """The graph in which a function was traced; `None` for a graph that is no function."""
    return getattr(graph, "outer_graph", None)


def captures(graph: tf.Graph) -> Sequence[tuple[tf.Tensor, tf.Tensor]]:
    """What a function takes from outside of it besides its arguments.

    Returns:
      Pairs of a tensor outside and the placeholder that stands for it inside; none for a graph
      that is no function.
    """
    return getattr(graph, "captures", ())


def parts_of_composites(graph: tf.Graph) -> list[tf.Tensor]:
    """The arguments of a function that hold parts of sparse or ragged tensors, such as values."""
    return [
        tensor
        for place, spec in _specs_of_inputs(graph).items()
        for tensor, is_part in zip(graph.inputs[place:], _are_parts(spec))
        if is_part
    ]


def parts_in_element(op: tf.Operation) -> list[tf.Tensor]:
    """The outputs of `IteratorGetNext` that hold parts of sparse or ragged tensors.

    It knows what an element consists of if the iterator is an argument of the function, or of one
    around it. A sparse or ragged tensor that is no part of another value is a `variant` here.

    Args:
      op: an operation that returns an element of a data set.
    """
    handle = op.inputs[0] if op.inputs else None
    while handle is not None and handle.op.type == "Placeholder":
        graph = handle.graph
        place = next((k for k, t in enumerate(graph.inputs) if t is handle), -1)
        outside = next((t for t, inside in captures(graph) if inside is handle), None)
        if outside is not None:
            handle = outside if is_symbolic(outside) else None
            continue
        spec = _specs_of_inputs(graph).get(place)
        if not isinstance(spec, tf.data.IteratorSpec):
            return []
        parts = []
        for of_element in tf.nest.flatten(spec._element_spec):
            is_variant = isinstance(of_element, _COMPOSITES)
            parts += [True] if is_variant else _are_parts(of_element)
        return [t for t, is_part in zip(op.outputs, parts) if is_part]
    return []


def _specs_of_inputs(graph: tf.Graph) -> dict[int, tf.TypeSpec]:
    """The specifications of the arguments of a function, by the place of their first tensor."""
    found, place = {}, 0
    signature = getattr(graph, "structured_input_signature", None)
    for spec in tf.nest.flatten(signature) if signature else ():
        # A value that is no tensor is part of the signature, but not of the graph.
        if isinstance(spec, tf.TypeSpec):
            found[place] = spec
            place += len(tf.nest.flatten(spec, expand_composites=True))
    return found


def _are_parts(spec: tf.TypeSpec) -> list[bool]:
    """Which of the tensors that make up a value belong to a sparse or ragged tensor in it."""
    count = len(tf.nest.flatten(spec, expand_composites=True))
    if isinstance(spec, tf.TensorSpec) or isinstance(spec, _COMPOSITES):
        return [isinstance(spec, _COMPOSITES)] * count
    # Such as the fields of an extension type, or the values of the replicas.
    inside = tf.nest.flatten(spec._component_specs)
    parts = [p for s in inside if isinstance(s, tf.TypeSpec) for p in _are_parts(s)]
    return parts if len(parts) == count else [True] * count


def spec_of_replicas(spec: tf.TypeSpec, num_replicas: int) -> tf.TypeSpec:
    """What describes a value for each replica, all of which fit one specification."""
    if num_replicas == 1:
        return spec
    return distributed_values.PerReplicaSpec(*[spec] * num_replicas)


def parts_of_replicas(graph: tf.Graph) -> list[list[list[tf.Tensor]]]:
    """The arguments of a function that hold one value for each replica.

    Returns:
      For each such argument, the tensors of the first replica, those of the second and so on.
    """
    found, place = [], 0
    signature = getattr(graph, "structured_input_signature", None)
    for spec in tf.nest.flatten(signature) if signature else ():
        count = len(tf.nest.flatten(spec, expand_composites=True))
        if isinstance(spec, distributed_values.PerReplicaSpec):
            given, parts = iter(graph.inputs[place : place + count]), []
            for of_replica in spec._value_specs:
                leaves = tf.nest.flatten(of_replica, expand_composites=True)
                parts.append([next(given) for _ in leaves])
            found.append(parts)
        place += count if isinstance(spec, tf.TypeSpec) else 0
    return found


def static_value(tensor: tf.Tensor) -> Any:
    """The value of a tensor as a NumPy array if the graph determines it, else `None`."""
    return smart_cond.smart_constant_value(tensor)


# --- functions ---------------------------------------------------------------------------------


@functools.cache
def function_attributes(op_type: str) -> tuple[str, ...]:
    """The attributes that name the functions that an operation of this type runs."""
    definition = op_def_registry.get(op_type)
    attributes = () if definition is None else definition.attr
    return tuple(a.name for a in attributes if a.type in ("func", "list(func)"))


def find_function(graph: tf.Graph, name: str) -> tf.Graph | None:
    """The graph of a function as it was traced, or `None` if TensorFlow did not keep it."""
    while graph is not None:
        found = getattr(graph._get_function(name), "graph", None)
        if found is not None:
            return found
        graph = outer_graph(graph)
    return None


def bodies(op: tf.Operation) -> dict[str, tf.Graph]:
    """The graphs of the functions that an operation may run.

    Args:
      op: any operation.

    Returns:
      Each graph by its role: the name of the attribute (`"f"` of a call, `"body"` and `"cond"` of
      a loop, `"then_branch"` and `"else_branch"`), with a number for a list (`"branches:0"`).
      Functions of other operations, such as data sets, are left out if TensorFlow did not keep
      their graphs. Graphs of calls, branches and loops are rebuilt if need be.
    """
    found = {}
    for attribute in function_attributes(op.type):
        value = op.get_attr(attribute)
        several = isinstance(value, list)
        for k, function in enumerate(value if several else [value]):
            graph = _body(op, function.name)
            if graph is not None:
                found[f"{attribute}:{k}" if several else attribute] = graph
    return found


def _body(op: tf.Operation, name: str) -> tf.Graph | None:
    graph = find_function(op.graph, name)  # it knows the shapes of variables
    if graph is not None or op.type not in CALLS | BRANCHES | LOOPS:
        return graph
    inputs = op.inputs[1:] if op.type in BRANCHES else op.inputs
    return control_flow_util_v2.get_func_graph(op, [t.shape for t in inputs], name)


def replace_body(call: tf.Operation, role: str, body: tf.Graph) -> None:
    """Makes an operation run an edited function, under a new name, so that no other one does.

    Args:
      call: a loop or a branch.
      role: one of the roles that `bodies` returns, other than that of a list.
      body: the graph, edited in place.
    """
    body.name = control_flow_util_v2.unique_fn_name(call.name, role)
    call._set_func_attr(role, control_flow_util_v2.create_new_tf_function(body))


# --- walks over the operations of one graph ----------------------------------------------------


def scope_of(op: tf.Operation) -> str:
    """The name scope in which an operation was made; its name if there is none."""
    return op.name.rpartition("/")[0] or op.name


def layer_path(name: str) -> str | None:
    """The names of the layers in whose scope an operation lies, joined by "/".

    Keras 3 opens the scope of a layer twice, to build and to call it, so the scope of a call ends
    in a number that the layer's name lacks. Other scopes, such as those of TensorFlow's functions,
    have no number unless they are repeated.

    Args:
      name: the name of the operation.

    Returns:
      The path, beginning with the outermost model; `None` outside of layers, as in a loss. In
      Keras 2 a model and a loss cannot be told apart, so the path has at least two names.
    """
    scopes = name.split("/")[:-1]
    while scopes and _OF_FUNCTIONS.fullmatch(scopes[-1]):
        scopes.pop()
    if GENERATION == 2:
        return "/".join(scopes) if len(scopes) > 1 else None
    if scopes[:1] == ["compile_loss"]:
        return None
    while scopes and not _NUMBER.search(scopes[-1]):
        scopes.pop()
    return "/".join(_NUMBER.sub("", scope) for scope in scopes) or None


def place_of(op: tf.Operation) -> str:
    """Where an operation was made, such as "in layer 'model/dense'", or "at 'scope'" in a loss."""
    path = layer_path(op.name)
    if path is not None:
        return f"in layer {path!r}"
    return f"at {scope_of(op)!r}" if "/" in op.name else "outside of layers"


def ancestors(
    tensors: Iterable[tf.Tensor], stop: Callable[[tf.Tensor], bool] = lambda tensor: False
) -> list[tf.Operation]:
    """The operations that tensors of one graph are computed from, in the order of creation.

    Args:
      tensors: where the walk begins; their own operations are among the result.
      stop: whether the walk ends at a tensor, without the operation that computes it.
    """
    tensors = list(tensors)
    seen, stack = set(), list(tensors)
    while stack:
        tensor = stack.pop()
        if tensor.op not in seen and not stop(tensor):
            seen.add(tensor.op)
            stack += tensor.op.inputs
    return [op for op in tensors[0].graph.get_operations() if op in seen] if tensors else []


def behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a chain of `Identity` operations passes on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# --- operations --------------------------------------------------------------------------------


def is_stateful(op_type: str) -> bool | None:
    """Whether TensorFlow declares a type of operations stateful; `None` for an unknown type."""
    definition = op_def_registry.get(op_type)
    return None if definition is None else definition.is_stateful


def takes_resources(op_type: str) -> bool:
    """Whether operations of a known type take a handle of a variable, a table, or the like."""
    definition = op_def_registry.get(op_type)
    return any(a.type == tf.resource.as_datatype_enum for a in definition.input_arg)


def overrides_gradient(op: tf.Operation) -> bool:
    """Whether an operation has another gradient than that of its type."""
    return "_gradient_op_type" in op.node_def.attr


def has_custom_gradient(op: tf.Operation) -> bool:
    """Whether an operation stands for a function with `tf.custom_gradient`."""
    if op.type != "IdentityN" or not overrides_gradient(op):
        return False
    return b"CustomGradient" in op.get_attr("_gradient_op_type")


def gradient_function(op: tf.Operation) -> Callable:
    """The function that TensorFlow calls with an operation and the gradients of its outputs."""
    return framework_ops.get_gradient_function(op)


def is_recomputation(op: tf.Operation) -> bool:
    """Whether a custom gradient is that of `tf.recompute_grad`: TensorFlow's own, computed late."""
    return _recomputed(op) is not None


def run_again(op: tf.Operation) -> list[tf.Tensor]:
    """Runs the function of a recomputation once more, as its gradient does.

    Args:
      op: an operation of which `is_recomputation` is true.

    Returns:
      Its results, for the first outputs of the operation.
    """
    call = _recomputed(op)
    if call is None:
        raise ValueError(f"`op` must end a recomputed function. Received: {op.name}")
    results = call["f"](*call["args"], **call["kwargs"])
    return [tf.convert_to_tensor(t) for t in tf.nest.flatten(results, expand_composites=True)]


def _recomputed(op: tf.Operation) -> dict[str, Any] | None:
    """What the gradient of `tf.recompute_grad` will run; `None` for any other."""
    registered = inspect.getclosurevars(gradient_function(op)).nonlocals.get("tape_grad_fn")
    if registered is None:
        return None
    function = inspect.getclosurevars(registered).nonlocals.get("grad_fn")
    if not inspect.isfunction(function) or function.__module__ != custom_gradient.__name__:
        return None
    if not function.__qualname__.startswith("recompute_grad."):
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells}


def line_of(op: tf.Operation) -> tuple[str, int] | None:
    """The file and the line of the user's program that made an operation, if they are known."""
    frames = [] if op.traceback is None else op.traceback.get_user_frames()
    for frame in reversed(frames):  # TensorFlow takes those of Keras for the user's
        if not frame.filename.startswith(_NOT_OF_USERS):
            return frame.filename, frame.lineno
    return None


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Feeds another tensor of the same type and shape to an operation."""
    op._update_input(index, tensor)


# --- random numbers ----------------------------------------------------------------------------


def must_be_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def clear_seed(op: tf.Operation) -> None:
    """Makes an operation that draws with a seed draw from the entropy of the process instead."""
    for name in ("seed", "seed2"):
        op._set_attr(name, attr_value_pb2.AttrValue(i=0))


def size_of_variable(handle: tf.Tensor) -> int:
    """How many entries the variable of a handle has."""
    (described,) = resource_variable_ops.get_eager_safe_handle_data(handle).shape_and_type
    return tf.TensorShape(described.shape).num_elements()


def hidden_variable(graph: tf.Graph, value: Any) -> tf.Variable:
    """A variable that no model, checkpoint or saved model sees; it lives as long as the graph."""
    with tf.init_scope():
        variable = resource_variable_ops.ResourceVariable(value, trainable=False, name="state")
    graph.hidden_variables = [*getattr(graph, "hidden_variables", ()), variable]
    return variable
