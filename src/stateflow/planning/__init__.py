"""Choosing, ahead of a run, what depends on its shapes and machine."""
