"""TensorFlow Federated processes with user-level differential privacy.

Nothing is public here yet: the client optimizers and processes build on the update rules of
`tf_adaptive_dp`, which this package imports and which never imports it.
"""

__all__: list = []
