"""Checks whose results are the table of docs/explanation/reliability.md, one check for each row.

Each check has a full form, which ``make reliability`` runs, and a short form. ``make test`` runs the short forms of the
checks that time nothing.
"""
