"""Runs the code of notebooks, cell by cell, and keeps what it printed and drew in the file.

The environments of the two stacks hold no Jupyter, so the cells run in plain Python here; in
Jupyter they run as they are. The tests run them too, without `--write`.

    python docs/tutorials/execute.py --write docs/tutorials/images.ipynb
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib
import tempfile
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def figures() -> list[dict[str, Any]]:
    """The figures that a cell left open, as outputs; closes them."""
    found = []
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, dpi=70, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return found


def execute(path: pathlib.Path) -> dict[str, Any]:
    """Runs the code cells of a notebook in one namespace.

    Args:
      path: the notebook.

    Returns:
      The notebook with new outputs.
    """
    notebook = json.loads(path.read_text("utf-8"))
    namespace = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
            exec(code, namespace)
        lines = printed.getvalue().splitlines(keepends=True)
        stream = {"output_type": "stream", "name": "stdout", "text": lines}
        cell["outputs"] = [*([stream] if lines else []), *figures()]
        cell["execution_count"] = number
    return notebook


def main() -> None:
    """Executes notebooks in an empty folder; with `--write` their files get the outputs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    for path in [path.resolve() for path in args.notebooks]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            notebook = execute(path)
            os.chdir(path.parent)
        if args.write:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
