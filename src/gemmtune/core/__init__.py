"""Data that every other package shares, and what isolates gemmtune from the versions of torch."""
