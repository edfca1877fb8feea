"""Choosing, ahead of a run: which cut of the sequence, which order of its chunks, which launches of its kernels."""
