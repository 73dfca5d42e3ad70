"""Fakes, factories and tools that several tests share."""
