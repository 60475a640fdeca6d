"""Federated averaging, round after round."""
