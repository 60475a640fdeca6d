"""Where the examples of the batch are in each tensor of a graph."""
