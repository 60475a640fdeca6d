"""The version of the library, read by `setup.py` without importing TensorFlow."""

__version__ = "0.1.0"
