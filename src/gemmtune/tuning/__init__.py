"""From a Problem to a Decision: which candidates are tried, and what is decided."""
