"""The private optimizers."""
