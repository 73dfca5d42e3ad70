"""Timing kernels: clocks, statistics, and the race that decides which is fastest."""
