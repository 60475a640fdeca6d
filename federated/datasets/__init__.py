"""Federated data sets: which client has which examples, and how a client reads its own."""
