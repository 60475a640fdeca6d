"""Private training for Keras: change the optimizer, keep the rest."""

from tf_adaptive_dp.version import __version__

__all__ = ["__version__"]
