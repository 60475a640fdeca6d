"""Which axis of each tensor of a graph is the batch, and which operations mix examples."""
