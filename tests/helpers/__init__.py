"""What several tests need: fakes, factories and small tools."""
