"""What is private to Keras and TensorFlow, or bound to a version, is used in `_keras` alone."""

import ast
import pathlib

import pytest

import tf_adaptive_dp

ROOT = pathlib.Path(tf_adaptive_dp.__file__).parent

# The packages that keep to the seam.
PACKAGES = [
    *("callbacks", "gradients", "mechanism", "optimizers", "side_information", "update_rules"),
    "validation",
]
FILES = [f for package in PACKAGES for f in sorted((ROOT / package).rglob("*.py"))]
# Ours, or documented: `_replace` of named tuples.
OWN = {
    "_captured",
    "_counters",
    "_fed",
    "_gram_norms",
    "_indices",
    "_lengths",
    "_released_by_mechanism",
    "_replace",
    "_vouched_for",
}
# Public by their name, but tied to Keras 2 or to this version of TensorFlow.
VERSION_BOUND = {
    "LossScaleOptimizer",
    "compiled_loss",
    "compiled_metrics",
    "enable_tune_steps_per_execution",
    "experimental_enable_variable_lifting",
    "true_dtype",
}


def leaks(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in VERSION_BOUND:
            yield node.attr
        if isinstance(node, ast.Constant) and node.value in VERSION_BOUND:
            yield node.value
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            own = own or node.attr in OWN
            if not own and not node.attr.startswith("__"):
                yield f"{ast.unparse(owner)}.{node.attr}"
        if isinstance(node, ast.FunctionDef) and node.name in (
            "_apply_weight_decay",
            "_internal_apply_gradients",
        ):
            yield node.name
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            yield from (n for n in names if n.startswith(("keras", "tensorflow.")))
    # Keras's own private attributes, reached through `self`.
    text = path.read_text(encoding="utf-8")
    yield from (
        name
        for name in ("_index_dict", "_var_key", "_built", "_build_learning_rate", "_learning_rate")
        if f"self.{name}" in text
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_of_keras_are_used_in_the_seam_alone(path):
    assert list(leaks(path)) == []


def test_the_search_finds_what_it_looks_for():
    found = set(leaks(ROOT / "_keras" / "optimizers.py"))
    assert {"LossScaleOptimizer", "_internal_apply_gradients", "optimizer._var_key"} <= found
