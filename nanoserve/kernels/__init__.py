"""Attention over paged memory: the oracle, and the kernels that are compared with it."""
