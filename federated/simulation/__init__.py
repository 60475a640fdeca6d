"""Simulation programs: `python -m federated.simulation.<name> --help`."""

import os

# Before anything here imports TensorFlow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
