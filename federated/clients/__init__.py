"""What clients do: local training with adaptive optimizers."""
