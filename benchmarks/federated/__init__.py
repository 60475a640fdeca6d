"""Federated rounds: how they scale with clients and over time, and what several hosts cost."""
