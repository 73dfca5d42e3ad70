"""The way from a Problem to a Decision: listing candidates, searching them, and deciding."""
