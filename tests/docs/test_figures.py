"""The committed figures are those that docs/figures/draw.py draws, and pages show each of them."""

import re

import pytest

from tests.helpers import ROOT
from tests.helpers.programs import run_example

FOLDER = ROOT / "docs" / "figures"
COMMITTED = {path.stem for path in FOLDER.glob("*.svg")}


def test_each_figure_is_drawn_and_shown():
    source = (FOLDER / "draw.py").read_text(encoding="utf-8")
    functions = set(re.findall(r"^def (\w+)\(\) -> plt.Figure", source, re.M))
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    assert functions == COMMITTED
    assert set(re.findall(r"figures/(\w+)\.svg\)", pages)) == COMMITTED


@pytest.mark.slow
def test_the_program_draws_them(tmp_path):
    run_example("../docs/figures/draw.py", "--out_dir", tmp_path)
    assert {path.stem for path in tmp_path.glob("*.svg")} == COMMITTED
