"""Timing of kernels: clocks, statistics, and the race that decides which kernel is fastest."""
