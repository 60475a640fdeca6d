"""Private and version-bound API of Keras and TensorFlow is used in `tf_adaptive_dp._keras` alone."""

import ast

import pytest

from tests.helpers import ROOT

FILES = sorted(p for root in ("tf_adaptive_dp", "federated") for p in (ROOT / root).rglob("*.py"))
OUTSIDE = [p for p in FILES if "_keras" not in p.parts]
FOREIGN = (
    "tensorflow.python",
    "tensorflow.core",
    "tensorflow.compiler",
    "keras.src",
    "keras.engine",
)
# Of named tuples and `os`, where an underscore does not mean private.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
# Of other libraries, each used in the one module that subclasses their class.
SUBCLASSED = {
    "tf_adaptive_dp/tuning/keras_tuner/tuner.py": {"_try_build", "_get_checkpoint_fname"},
    "federated/training/monitor.py": {"_summary_writer"},
}


def defined(tree):
    """The private names that a module gives to functions, classes, attributes and globals."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


# Marks that the mechanism puts on tensors.
MARKS = {"_released_by_mechanism", "_vouched_for"}
OWN = {name for path in FILES for name in defined(ast.parse(path.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_private_of_others_is_used(path):
    found, allowed = [], OWN | MARKS | PUBLIC | SUBCLASSED.get(str(path.relative_to(ROOT)), set())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = []
        found += [(node.lineno, name) for name in names if name.startswith(FOREIGN)]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if node.attr not in allowed and not node.attr.endswith("__"):
                found.append((node.lineno, ast.unparse(node)))
    assert not found
