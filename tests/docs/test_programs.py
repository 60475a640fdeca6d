"""The programs of the site's pages run.

Blocks marked `python` on a page are one program, in their order. Blocks marked `py` are excerpts.
A block without a mark that follows a program at once is what it prints.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tf_adaptive_dp._keras.generation import GENERATION

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
PRINTED = re.compile(r"^```python\n(?:(?!^```).)*^```\n\n```\n(.*?)^```$", re.M | re.S)
# tests/test_documents.py runs their programs, with what they need or looks at what they print.
ELSEWHERE = {"federated.md", "how-to/tune-honestly.md", "stacks.md"}
WITHOUT_TFF = importlib.util.find_spec("tensorflow_federated") is None
OF_TFF = {"api/federated.md", "how-to/federated.md"}


def program(page):
    return "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))


PAGES = {
    name: page
    for page in sorted(DOCS.rglob("*.md"))
    if (name := page.relative_to(DOCS).as_posix()) not in ELSEWHERE and program(page)
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", PAGES)
def test_the_programs_of_a_page_run(name, tmp_path):
    if name in OF_TFF and WITHOUT_TFF:
        pytest.skip("TensorFlow Federated is for the older stack")
    if GENERATION == 2 and not name.startswith("api/") and name not in OF_TFF:
        pytest.skip("these pages are written for Keras 3")
    done = subprocess.run(
        [sys.executable, "-c", program(PAGES[name])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for printed in PRINTED.findall(PAGES[name].read_text(encoding="utf-8")):
        assert printed in done.stdout


def test_some_pages_show_what_their_programs_print():
    shown = [name for name, page in PAGES.items() if PRINTED.search(page.read_text("utf-8"))]
    assert "how-to/choose-a-budget.md" in shown
