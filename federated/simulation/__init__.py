"""Simulation programs: `python -m federated.simulation.<name> --help`."""
