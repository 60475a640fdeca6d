"""Private and version-bound API of Keras and TensorFlow is used in the seam alone."""

import ast
import inspect
import types

import pytest

from tests.helpers import ROOT

FILES = sorted(p for root in ("tf_adaptive_dp", "federated") for p in (ROOT / root).rglob("*.py"))
OUTSIDE = [p for p in FILES if "_keras" not in p.parts]
FOREIGN = ("tensorflow.python", "tensorflow.core", "tensorflow.compiler", "keras.")
# Public by their name, but tied to Keras 2 or to this version of TensorFlow.
VERSION_BOUND = {
    "LossScaleOptimizer",
    "compiled_loss",
    "compiled_metrics",
    "enable_tune_steps_per_execution",
    "_v1",  # the end of the names of modules
    "experimental_enable_variable_lifting",
    "true_dtype",
}
# Keras calls these; to define one is to override it.
HOOKS = {"_apply_weight_decay", "_internal_apply_gradients"}
# Marks that ours put on tensors and graphs.
MARKS = {"_optimizers_of_losses", "_released_by_mechanism", "_vouched_for"}
# Functions whose second argument names an attribute.
NAMING = ("getattr", "hasattr", "setattr")
# Of named tuples and `os`, where an underscore does not mean private.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
# Of other libraries, each in the one module that subclasses their class.
SUBCLASSED = {
    "tf_adaptive_dp/tuning/keras_tuner/tuner.py": {"_try_build", "_get_checkpoint_fname"},
}
# The private names of these classes that ours call, override or replace. If a version renamed one,
# what we define would be a name of our own that nobody reads.
OF_BASE_CLASSES = {
    ("keras_tuner", "Tuner"): {"_get_tuner_fname", "_try_build", "_get_checkpoint_fname"},
    ("tensorflow_privacy", "QuantileEstimatorQuery"): {"_construct_below_estimate_query"},
    ("tensorflow_privacy", "QuantileAdaptiveClipSumQuery"): {
        "_sum_query",
        "_quantile_estimator_query",
    },
}


def parsed(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def defined(nodes):
    """The names that a module gives to functions, classes, globals and its own attributes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


OWN = {name for path in OUTSIDE for name in defined(parsed(path))}


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def leaks(path):
    own = OWN | MARKS | PUBLIC | SUBCLASSED.get(str(path.relative_to(ROOT)), set())
    for node in parsed(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (m for m in [node.module + "."] if m.startswith(FOREIGN))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if f"{a.name}.".startswith(FOREIGN))
        elif isinstance(node, ast.FunctionDef) and node.name in HOOKS:
            yield node.name
        elif isinstance(node, ast.Constant) and node.value in VERSION_BOUND:
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in NAMING:
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            yield from (n for n in names if is_private(n) and n not in own)
        elif isinstance(node, ast.Attribute):
            foreign = is_private(node.attr) and node.attr not in own
            if node.attr in VERSION_BOUND or foreign:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_keras_are_used_in_the_seam_alone(path):
    assert list(leaks(path)) == []


def names_within(function):
    """The attributes that a function reads or sets, those of its lambdas and generators too."""
    pending, found = [function.__code__], set()
    while pending:
        code = pending.pop()
        found.update(code.co_names)
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return found


@pytest.mark.parametrize("library, name", OF_BASE_CLASSES)
def test_base_classes_of_other_libraries_still_use_the_names_that_ours_replace(library, name):
    base = getattr(pytest.importorskip(library), name)
    own = [f for c in base.__mro__[:-1] for f in vars(c).values() if inspect.isfunction(f)]
    used = set().union(*map(names_within, own))
    assert OF_BASE_CLASSES[library, name] <= used


def test_the_search_finds_what_it_looks_for():
    seam = ROOT / "tf_adaptive_dp" / "_keras"
    found = {name for path in seam.glob("*.py") for name in leaks(path)}
    assert {"_internal_apply_gradients", "optimizer._var_key", "_original_dataset"} <= found
    assert any(name.startswith("tensorflow.python.") for name in found)
    assert any(name.endswith(".LossScaleOptimizer") for name in found)
