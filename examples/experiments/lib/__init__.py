"""What the experiments share: the harness, training runs, grids of settings and data sets."""
