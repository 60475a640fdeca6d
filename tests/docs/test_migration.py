"""Every public name of TF Privacy has a row in the table, and every name of ours there resolves."""

import importlib
import re
import types

import pytest

from tests.helpers import ROOT, tf_privacy

PAGE = (ROOT / "docs" / "migration" / "tf-privacy.md").read_text(encoding="utf-8")
ROWS = {
    name: here for name, here in re.findall(r"^\| `([\w.]+)` \| ([^|]*) \| [^|]*\|$", PAGE, re.M)
}
OURS = sorted(set(re.findall(r"`((?:tf_adaptive_dp|federated)\.[\w.]+)`", "".join(ROWS.values()))))


def public(module, prefix=""):
    """The classes and functions that a module offers."""
    names = getattr(module, "__all__", None) or dir(module)
    return {
        prefix + name
        for name in names
        if not name.startswith("_") and not isinstance(getattr(module, name), types.ModuleType)
    }


def test_every_name_of_tf_privacy_has_a_row():
    package = tf_privacy()
    names = public(package) | public(package.v1, "v1.")
    assert len(names) > 50
    assert names == set(ROWS)


def test_each_row_names_ours_or_none():
    for name, here in ROWS.items():
        assert here == "none" or re.search(r"`(tf_adaptive_dp|federated)\.", here), name


@pytest.mark.parametrize("name", OURS)
def test_each_name_of_ours_resolves(name):
    module, _, attribute = name.rpartition(".")
    if module == "federated":  # its names need TensorFlow Federated
        assert attribute in importlib.import_module("federated").__all__
    else:
        assert callable(getattr(importlib.import_module(module), attribute))
