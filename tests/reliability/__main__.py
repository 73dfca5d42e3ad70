"""Run checks and write docs/explanation/reliability.md.

    make reliability                                           every check at full size (long)
    PYTHONPATH=tests python -m reliability NAME [NAME ..]      some of them
    PYTHONPATH=tests python -m reliability --short             all at the size that ``make test`` uses
    PYTHONPATH=tests python -m reliability --list

Each full run writes its raw data to tests/reliability/results/NAME.json. The report is made from these files.
"""

from __future__ import annotations

import argparse
import sys
import time

from .checks import Check, Outcome, all_checks
from .report import write_report, write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--short", action="store_true", help="small sizes; leaves no results")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    checks = all_checks()
    unknown = set(args.names) - checks.keys()
    if unknown:
        parser.error(f"unknown checks: {', '.join(sorted(unknown))}; --list names them")
    if args.list:
        for check in checks.values():
            print(f"{check.name:<28} {check.subject}")
        return 0
    failed = [name for name in args.names or checks if not _run(checks[name], full=not args.short).ok]
    if not args.short:
        write_report(checks)
    if failed:
        print(f"below the bar: {', '.join(failed)}")
    return 1 if failed else 0


def _run(check: Check, *, full: bool) -> Outcome:
    """Run one check, print its outcome, and write its raw data if the run is full."""
    start = time.perf_counter()
    outcome = check.run(full)
    seconds = time.perf_counter() - start
    print(f"{'ok  ' if outcome.ok else 'BAD '} {check.name:<28} {outcome.measured}   ({seconds:.0f} s)", flush=True)
    if full:
        write_result(check, outcome, seconds)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
