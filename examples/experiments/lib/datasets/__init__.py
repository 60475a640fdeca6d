"""The data sets of the experiments as arrays: a private training part and a test part."""
