"""The version of the library, which the build reads without importing TensorFlow."""

__version__ = "0.1.0"
