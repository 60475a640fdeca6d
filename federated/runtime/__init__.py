"""TFF's workers, which end with Python."""
