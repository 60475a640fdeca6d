"""The public names, and the direction of imports."""

import ast
import graphlib
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import federated
import tf_adaptive_dp

ROOT = pathlib.Path(tf_adaptive_dp.__file__).parents[1]

PUBLIC = [
    tf_adaptive_dp,
    tf_adaptive_dp.accounting,
    tf_adaptive_dp.auditing,
    tf_adaptive_dp.gradients,
    tf_adaptive_dp.normalization,
    tf_adaptive_dp.optimizers,
    tf_adaptive_dp.optimizers.baselines,
    tf_adaptive_dp.plan,
    tf_adaptive_dp.report,
    tf_adaptive_dp.sampling,
    tf_adaptive_dp.side_information,
    tf_adaptive_dp.tuning,
    tf_adaptive_dp.validation,
    federated,
]

# A package imports only itself and those of earlier lines.
RANKS = [
    {"errors"},
    {"_keras"},
    {"checks", "version", "wording"},
    {"accounting", "gradients", "update_rules"},
    {"durable", "mechanism", "sampling", "side_information"},
    {"normalization"},
    {"validation"},
    {"auditing", "optimizers", "statement"},
    {"callbacks", "report"},
    {"plan_refusals"},
    {"planned_training"},
    {"plan", "tuning"},
]
FEDERATED_RANKS = [
    {"clients", "datasets", "privacy", "runtime"},
    {"training"},
    {"simulation"},
]
RANK = {
    f"{root}.{name}": rank
    for root, ranks in (("tf_adaptive_dp", RANKS), ("federated", FEDERATED_RANKS))
    for rank, names in enumerate(ranks)
    for name in names
}
FILES = sorted(p for root in ("tf_adaptive_dp", "federated") for p in (ROOT / root).rglob("*.py"))
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in FILES}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Its names are imported when they are first used, and need TFF then.
WITHOUT_TFF = importlib.util.find_spec("tensorflow_federated") is None
no_tff = pytest.mark.skipif(WITHOUT_TFF, reason="TensorFlow Federated is for the older stack")


@pytest.mark.parametrize(
    "package",
    [pytest.param(p, id=p.__name__, marks=no_tff if p is federated else ()) for p in PUBLIC],
)
def test_each_public_name_resolves_and_is_documented(package):
    for name in package.__all__:
        value = getattr(package, name)
        assert name == "__version__" or value.__doc__.strip(), name
    assert list(package.__all__) == sorted(package.__all__)


@pytest.mark.parametrize("module", [m for m in MODULES if m.count(".") and "__init__" not in m])
def test_imports_run_one_way(module):
    root, own = module.split(".")[:2]
    for imported in imports(MODULES[module]):
        parts = imported.split(".")
        if root == "tf_adaptive_dp":
            assert parts[0] not in ("federated", "tensorflow_federated")
            assert parts[0] != "keras_tuner" or module.startswith(
                "tf_adaptive_dp.tuning.keras_tuner."
            )
        if parts[0] == root and len(parts) > 1 and parts[1] != own:
            used = f"{root}.{parts[1]}"
            assert RANK[used] < RANK[f"{root}.{own}"], f"{own} imports {used}"


def test_every_package_has_a_rank():
    packages = {".".join(m.split(".")[:2]) for m in MODULES}
    assert packages - {"tf_adaptive_dp.__init__", "federated.__init__"} == set(RANK)


def test_no_modules_import_each_other():
    # Imports for types alone and those within functions count too.
    graph = {
        module: {m for m in imports(path) if m in MODULES and m != module}
        for module, path in MODULES.items()
    }
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the modules
    assert order.is_active()


@pytest.mark.slow_on(2)
def test_importing_the_library_imports_no_extra():
    code = (
        "import sys, tensorflow; tensorflow.keras.Model; of_keras = set(sys.modules);"
        "import tf_adaptive_dp, tf_adaptive_dp.tuning;"
        "print([m for m in ('tensorflow_federated', 'keras_tuner', 'matplotlib', 'sklearn',"
        " 'tensorflow_datasets', 'federated') if m in sys.modules and m not in of_keras])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
