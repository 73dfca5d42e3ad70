"""Checking and timing kernels: operands, verification, statistics, clocks and races."""
