"""What Python and Keras know an optimizer class by: its signature and its names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Callable, ClassVar, TypeVar

from tf_adaptive_dp._keras.generation import keras
from tf_adaptive_dp._keras.optimizers import SelfScalingOptimizer

PACKAGE = "tf_adaptive_dp"

_Class = TypeVar("_Class", bound=type)

# A private optimizer has nothing but the name of Keras's wrapper for loss scaling, its first base.
_BYPASSED = (*SelfScalingOptimizer.__bases__, object)
# An argument of Keras 3 that every private optimizer refuses; `loss_scale` takes its place.
_REFUSED = frozenset({"loss_scale_factor"})
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What an error shows as the value of an argument.
_ANY = "..."
_EXAMPLES = {"l2_norm_clip": "1.0", "noise_multiplier": "1.1", "learning_rate": "0.1"}


class FullSignature:
    """Shows `inspect.signature` and `help` every argument of a class, like Keras's own optimizers.

    Constructors here pass arguments that they do not know on to Keras as `**kwargs`, and in Keras 2
    a metaclass hides the constructor altogether. A class that sets an argument of its base itself
    names it in its head: `class DPRPub(AdaDPS, sets=("order",))`.

    Where Python would say that arguments do not fit, the error says which ones to write, since
    optimizers of Keras take the learning rate first.
    """

    __signature__: ClassVar[inspect.Signature]
    _not_passed_on: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, sets: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._not_passed_on = cls._not_passed_on.union(sets)
        refused = _REFUSED if issubclass(cls, SelfScalingOptimizer) else frozenset()
        cls.__signature__ = _full_signature(cls, cls._not_passed_on | refused)
        if "__init__" in vars(cls):
            cls.__init__ = _explaining(cls.__init__)  # type: ignore[method-assign]


def _full_signature(cls: type, omitted: frozenset[str]) -> inspect.Signature:
    """The arguments of a class and those that its constructors pass on, without annotations."""
    found: dict[str, inspect.Parameter] = {}
    positional = True  # whether arguments of the constructor at hand can be given by position
    for base in cls.__mro__:
        if base in _BYPASSED or "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for parameter in own:
            name = parameter.name
            if parameter.kind in _VARIADIC or name in found or name in omitted:
                continue
            if name == "name" and not issubclass(base, FullSignature):
                parameter = parameter.replace(default=cls.__name__)
            kind = parameter.kind if positional else parameter.KEYWORD_ONLY
            found[name] = parameter.replace(annotation=parameter.empty, kind=kind)
        positional &= any(p.kind == p.VAR_POSITIONAL for p in own)
        defaults = [p for p in found.values() if p.default is not p.empty]
        positional &= all(p.kind == p.KEYWORD_ONLY for p in defaults)
        if not any(p.kind == p.VAR_KEYWORD for p in own):
            break
    else:
        found["kwargs"] = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))


def _explaining(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that refuses what Python would refuse, with what to write in its place."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self).__init__ is __init__:  # and not that of a base
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(_what_to_write(type(self), args, kwargs, error)) from None
        init(self, *args, **kwargs)

    return __init__


def _what_to_write(cls: type, args: tuple, kwargs: dict[str, Any], error: TypeError) -> str:
    """How to construct an optimizer, for those who wrote `args` and `kwargs`."""
    parameters = inspect.signature(cls).parameters
    by_place = [f"`{p.name}`" for p in parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    if not by_place:
        taken = "It takes none by position"
    elif len(by_place) == 1:
        taken = f"By position it takes only {by_place[0]}"
    else:
        taken = f"By position it takes {', '.join(by_place)}, in this order"
    given = ", ".join([*map(repr, args), *(f"{n}={value!r}" for n, value in kwargs.items())])
    chooses = "learning_rate" in parameters and not getattr(cls, "adapts_learning_rate", False)
    example = _example(cls, ["learning_rate"] if chooses else [])
    return (
        f"Pass the arguments of `{cls.__name__}` by name: `{example}`. {taken}. "
        "A `PrivacyPlan` finds the noise for an epsilon. "
        f"Received: {cls.__name__}({given}): {error}"
    )


def _example(cls: type, more: Sequence[str] = ()) -> str:
    """A call of a class with the arguments that it needs, and others."""
    names = [*_needed(cls), *more]
    return f"{cls.__name__}({', '.join(f'{n}={_EXAMPLES.get(n, _ANY)}' for n in names)})"


def _needed(cls: type) -> list[str]:
    """The arguments of a class that have no default."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]


def register(cls: _Class) -> _Class:
    """Registers an optimizer class for saving, and by its bare name for `keras.optimizers.get`.

    It is saved as `tf_adaptive_dp>{name}`. The bare name, also in lower case, is for configurations
    written by hand. A class of that name in `custom_objects`, or registered earlier, takes
    precedence.

    Args:
      cls: the class.

    Returns:
      The same class.
    """
    keras.saving.register_keras_serializable(PACKAGE)(cls)
    for name in (cls.__name__, cls.__name__.lower()):
        keras.saving.get_custom_objects().setdefault(name, cls)
    return cls


def require_arguments(cls: type, config: dict) -> None:
    """Rejects a configuration without the arguments that have no default, such as that of a name.

    Args:
      cls: a class with a `FullSignature`.
      config: its arguments by name.

    Raises:
      ValueError: if some are missing. The message says what to write.
    """
    missing = [name for name in _needed(cls) if name not in config]
    if missing:
        raise ValueError(
            f"{cls.__name__} has no default for {', '.join(f'`{name}`' for name in missing)}, so "
            f"its name alone is not enough to make an optimizer. Received: config={config!r}. Pass "
            f"`optimizer={_example(cls)}` to `compile`; "
            "`tf_adaptive_dp.noise_multiplier_for` finds the noise for an epsilon."
        )
