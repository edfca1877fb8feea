"""Which cut of the sequence, which order: cost and memory of a run before it runs, and the search over plans."""
