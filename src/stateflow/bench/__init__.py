"""Benchmarks that anyone can run again: `stateflow bench NAME`."""
