"""Experiments of the papers, each a program: `python examples/experiments/<name>/run.py`."""
