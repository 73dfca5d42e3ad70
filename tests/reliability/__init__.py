"""The figures behind docs/explanation/reliability.md: one check a row of its table, each in a long form and a short
one.

``make reliability`` runs the long forms; ``make test`` runs the short ones that time nothing.
"""
