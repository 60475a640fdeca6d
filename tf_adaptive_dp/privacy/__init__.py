"""Counting and accounting of what was released."""
