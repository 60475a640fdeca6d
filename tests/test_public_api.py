"""The public names, and the direction of imports."""

import ast
import pathlib
import subprocess
import sys

import pytest

import federated
import tf_adaptive_dp

ROOT = pathlib.Path(tf_adaptive_dp.__file__).parents[1]

# A package imports from its own rank only itself, and otherwise from those below.
RANKS = [
    {"errors", "checks", "version"},
    {"gradients", "privacy", "update_rules"},
    {"mechanism", "side_information", "callbacks", "release_log", "validation"},
    {"optimizers", "selection"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
KERAS_TUNER = {"oracle", "tuner", "tuner_arguments"}
FILES = sorted((ROOT / "tf_adaptive_dp").rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "package", [tf_adaptive_dp, tf_adaptive_dp.gradients, tf_adaptive_dp.selection, federated]
)
def test_each_public_name_resolves_and_is_documented(package):
    for name in package.__all__:
        value = getattr(package, name)
        assert name == "__version__" or value.__doc__.strip(), name
    assert list(package.__all__) == sorted(package.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    parts = path.relative_to(ROOT / "tf_adaptive_dp").with_suffix("").parts
    own = parts[0]
    for module in imports(path):
        assert module.split(".")[0] not in ("federated", "tensorflow_federated")
        # The front of KerasTuner, which `selection` loads when it is asked for.
        assert module.split(".")[0] != "keras_tuner" or path.stem in KERAS_TUNER
        if own != "__init__" and module.startswith("tf_adaptive_dp."):
            used = module.split(".")[1]
            assert used == own or RANK[used] < RANK[own], f"{own} imports {used}"


def test_every_module_has_a_rank():
    names = {p.relative_to(ROOT / "tf_adaptive_dp").with_suffix("").parts[0] for p in FILES}
    assert names - {"__init__"} == set(RANK)


def test_importing_the_library_imports_no_extra():
    code = (
        "import sys, tf_adaptive_dp, tf_adaptive_dp.selection;"
        "print([m for m in ('tensorflow_federated', 'keras_tuner', 'matplotlib', 'sklearn',"
        " 'tensorflow_datasets', 'federated') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
