"""The API pages show every public name once, with an example."""

import ast
import importlib
import re
import types

import pytest

import federated
import federated.datasets
import tf_adaptive_dp
from tests.helpers import ROOT

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.M)
# How all optimizers show what they share; it is no public name.
SHARED = "tf_adaptive_dp.optimizers.shared_attributes.SharedAttributes"


def public_modules(module=tf_adaptive_dp):
    """`tf_adaptive_dp` and every module that an `__all__` names."""
    yield module
    for name in module.__all__:
        if isinstance(getattr(module, name), types.ModuleType):
            yield from public_modules(getattr(module, name))


MODULES = list(public_modules())


def defined_at(value):
    return f"{value.__module__}.{value.__qualname__}"


def public_objects():
    """Where each public class and function is defined, and its name."""
    further = (tf_adaptive_dp.callbacks, tf_adaptive_dp.plan, tf_adaptive_dp.report)
    for module in (*MODULES, *further):
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, (types.ModuleType, str)):
                yield defined_at(value), name
    for name, module in federated._MODULE_OF.items():  # TFF need not be installed
        yield f"federated.{module}.{name}", name
    for name, module in federated.datasets._MODULE_OF.items():
        yield f"federated.datasets.{module}.{name}", name


NAMES = dict(public_objects())


def resolved(path):
    """Where the object of a directive is defined."""
    if path.startswith("federated."):
        return path
    module, _, name = path.rpartition(".")
    return defined_at(getattr(importlib.import_module(module), name))


SHOWN = [
    (resolved(path), page)
    for page, text in TEXT.items()
    for path in DIRECTIVE.findall(text)
    if path != SHARED
]


def docstring(place):
    """The docstring of a class or function, read from the source."""
    module, _, name = place.rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (node,) = (n for n in tree.body if getattr(n, "name", None) == name)
    return ast.get_docstring(node)


def test_every_public_name_is_shown_once():
    assert sorted(place for place, _ in SHOWN) == sorted(NAMES)


def test_each_module_is_named_on_a_page():
    text = "\n".join(TEXT.values())
    for module in MODULES[1:]:
        name = module.__name__
        assert f"`{name}`" in text or f"::: {name}." in text, name
    assert "`tf_adaptive_dp.__version__`" in text
    assert all(f"({page.name})" in TEXT["index.md"] for page in PAGES if page.name != "index.md")


@pytest.mark.parametrize(("place", "page"), SHOWN, ids=[NAMES.get(p, p) for p, _ in SHOWN])
def test_each_name_has_an_example(place, page):
    blocks = "\n".join(re.findall(r"^```py(?:thon)?\n(.*?)^```$", TEXT[page], re.M | re.S))
    name = NAMES[place]
    assert ">>> " in docstring(place) or re.search(rf"\b{name}\b", blocks), name
