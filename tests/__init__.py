"""Tests of tf_adaptive_dp and federated."""
