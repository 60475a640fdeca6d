"""One file a framework: each makes the training step that a worker then times."""
