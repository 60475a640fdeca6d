"""Time and memory of training steps and of federated rounds: `python -m benchmarks.steps.run`."""

import os

# Before anything here imports TensorFlow.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
