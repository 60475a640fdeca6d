"""Experiments of the papers, each a program: `python examples/experiments/<name>/run.py`."""

import os

# Before anything here imports TensorFlow. Its log of errors is full of what is none, and would tear
# the progress bar; what goes wrong raises.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Figures go to files; no screen is needed.
os.environ.setdefault("MPLBACKEND", "Agg")
