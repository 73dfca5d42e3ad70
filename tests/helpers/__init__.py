"""Fakes, factories and small tools that several tests share."""
