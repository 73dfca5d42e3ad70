"""Checking that kernels are right: operands, the oracle, and comparisons with it."""
