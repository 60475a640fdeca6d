"""TFF's workers and the contexts that compute in them."""
