"""Side information for AdaDPS."""
