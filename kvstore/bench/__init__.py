"""Benchmarks: each figure is a ratio to a baseline measured in turn with it, in one run."""
