"""Which sums over clients reach what a learning process returns, read from its computation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Union

import tensorflow_federated as tff

from tf_adaptive_dp.errors import NotPrivateError
from tf_adaptive_dp.mechanism.noise import has_fresh_normal_numbers

# The sums that a value depends on, by number; the same of each part; or a function of such values.
_Value = Union["frozenset[int]", "tuple[_Value, ...]", Callable[["_Value"], "_Value"]]
_NOTHING: frozenset[int] = frozenset()
# These only move values, and these apply a function. No other intrinsic keeps parts apart.
_MOVES = ("federated_value_at_", "federated_broadcast", "federated_zip_at_")
_APPLIES = ("federated_map", "federated_apply")


def check_releases(process: Any) -> bool:
    """Checks that all that a process keeps of its clients goes through its private aggregator.

    It follows each sum over clients through the computation `process.next`, to all that a round
    returns.

    Guarantee: if it returns true, nothing that a round returns, except the metrics `client_work`,
    depends on clients other than through the one sum that `aggregator.dp_event` of the state
    depends on. Of what happens to that sum, only that the library's own noise is drawn is checked
    here; `UserLedger` compares its size. All results of a TensorFlow graph count as if they
    depended on all its arguments, so doubt leads to a refusal.

    Args:
      process: a learning process.

    Returns:
      False if `process.next` is no computation of TFF, so that nothing is known.

    Raises:
      NotPrivateError: if something else of the clients is kept or released, or if the noise is not
        that of `UserLevelPrivacy.aggregator`.
    """
    # Rounds in groups return what those of single clients return.
    computation = getattr(process.next, "single", process.next)
    if not isinstance(computation, tff.framework.ConcreteComputation):
        return False
    proto = tff.framework.serialize_computation(computation)
    returned = proto.type.function.result, _Reader().called(proto, _NOTHING)
    state = _part(*returned, "state")
    private = _sums(_part(*_part(*state, "aggregator"), "dp_event")[1])
    if len(private) != 1:
        raise NotPrivateError(
            "`process` must have one private aggregator, `privacy.aggregator()`. Received: none "
            "with one clipped sum in `state.aggregator`"
        )
    if not has_fresh_normal_numbers(proto.SerializeToString()):
        raise NotPrivateError(
            "`process` must have the aggregator `privacy.aggregator()`. Another one, such as "
            "`tff.learning.dp_aggregator` or `tff.aggregators.DifferentiallyPrivateFactory`, takes "
            "the queries of TF Privacy: a client whose update is so large that its norm overflows "
            "turns their whole sum into NaN, noise included. Received: a process whose aggregator "
            "draws other noise than that of `UserLevelPrivacy`"
        )
    places = {f"state.{name}": part for name, part in _named(*state)}
    for name, part in _named(*returned):
        if name == "metrics":
            metrics = _named(*_part(*returned, name))
            places.update((f"metrics.{n}", one) for n, one in metrics if n != "client_work")
        elif name != "state":
            places[name] = part
    others = [name for name, part in places.items() if not _sums(part) <= private]
    if others:
        raise _refused(others)
    return True


def _refused(places: list[str]) -> NotPrivateError:
    return NotPrivateError(
        "`process` must take nothing from clients but what its private aggregator takes. This one "
        "computes other sums over clients, without clipping or noise, and keeps or releases what "
        "depends on them, so no ε would hold. Mime, for example, sends the clients' exact mean "
        "gradients to the server. Use `federated.build_dp_fed_avg`, or an algorithm of TFF such as "
        "`build_unweighted_fed_avg`. For a run without privacy, pass no `ledger` and leave out the "
        f"private aggregator. Received: exact sums in {', '.join(places)}"
    )


class _Reader:
    """Follows sums through a computation; each evaluation of a sum gets a number of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def value(self, proto: Any, names: dict[str, _Value]) -> _Value:
        """The value of an expression.

        Args:
          proto: the serialized expression.
          names: the values of the names that it may refer to.
        """
        kind = proto.WhichOneof("computation")
        if kind == "reference":
            return names[proto.reference.name]
        if kind == "struct":
            return tuple(self.value(part.value, names) for part in proto.struct.element)
        if kind == "selection":
            whole = self.value(proto.selection.source, names)
            return whole[proto.selection.index] if isinstance(whole, tuple) else whole
        if kind == "call":
            call = proto.call
            given = self.value(call.argument, names) if call.HasField("argument") else _NOTHING
            return self.called(call.function, given, names)
        if kind == "block":
            for local in proto.block.local:
                names = {**names, local.name: self.value(local.value, names)}
            return self.value(proto.block.result, names)
        if kind == "lambda":
            function = getattr(proto, "lambda")
            return lambda given: self.value(
                function.result, {**names, function.parameter_name: given}
            )
        if kind == "intrinsic":
            return functools.partial(self._intrinsic, proto)
        return _sums if proto.type.HasField("function") else _NOTHING  # a graph, or a constant

    def called(
        self, function: Any, given: _Value, names: dict[str, _Value] | None = None
    ) -> _Value:
        """The result of a function.

        Args:
          function: the serialized expression.
          given: the value of its argument.
          names: the values of the names that the expression may refer to.
        """
        found = self.value(function, names or {})
        # A function may be a part of a structure of which only the sums are known.
        return found(given) if callable(found) else _sums((found, given))

    def _intrinsic(self, proto: Any, given: _Value) -> _Value:
        uri, function = proto.intrinsic.uri, proto.type.function
        if uri.startswith(_MOVES):
            return given
        if uri.startswith(_APPLIES) and isinstance(given, tuple) and callable(given[0]):
            return given[0](given[1])
        if _is_at(function.result, "server") and _takes_from_clients(function.parameter):
            return _sums(given) | {next(self._numbers)}
        return _sums(given)


def _sums(value: _Value) -> frozenset[int]:
    """All sums that a value depends on, or that a function does."""
    if isinstance(value, frozenset):
        return value
    if isinstance(value, tuple):
        return _NOTHING.union(*map(_sums, value))
    return _sums(value(_NOTHING))


def _is_at(kind: Any, placement: str) -> bool:
    return kind.HasField("federated") and kind.federated.placement.value.uri == placement


def _takes_from_clients(kind: Any) -> bool:
    parts = kind.struct.element if kind.HasField("struct") else ()
    return _is_at(kind, "clients") or any(_takes_from_clients(part.value) for part in parts)


def _named(kind: Any, value: _Value) -> list[tuple[str, _Value]]:
    """The parts of a structure by name; parts of which only the sums are known share these."""
    if kind.HasField("federated"):
        kind = kind.federated.member
    if not kind.HasField("struct"):
        return [("", value)]
    parts = kind.struct.element
    values = value if isinstance(value, tuple) else [value] * len(parts)
    return [(part.name, one) for part, one in zip(parts, values)]


def _part(kind: Any, value: _Value, name: str) -> tuple[Any, _Value]:
    """The type and the value of a part; nothing is known of the sums in a part that is missing."""
    inner = kind.federated.member if kind.HasField("federated") else kind
    types = {part.name: part.value for part in inner.struct.element}
    return types.get(name, inner), dict(_named(kind, value)).get(name, _NOTHING)
