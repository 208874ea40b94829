"""Benchmarks: a correctness check first, then times, with bytes per second beside each."""
