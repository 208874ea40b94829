"""Measuring: correctness first, then time, with bytes per second beside every figure."""
