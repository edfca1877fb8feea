"""Choosing, ahead of a run, what depends on its shapes and machine: cuts, orders, kernels' plans."""
