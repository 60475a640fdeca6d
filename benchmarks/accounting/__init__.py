"""The figures of correlated noise beside those of another library."""
