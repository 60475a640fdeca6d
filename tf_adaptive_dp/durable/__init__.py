"""Files that survive a crash: for training, tuning and federated rounds alike."""
