"""Per-example gradients."""
