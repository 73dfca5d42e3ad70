"""``gemmtune doctor``: what this machine has and what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .common import JsonOption, StoreOption, ThreadsOption, exit_on_error, print_json, print_lines, quiet_stdout

if TYPE_CHECKING:
    from .doctor_report import DoctorReport


@exit_on_error
def doctor(
    threads: ThreadsOption = None,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the machine, the libraries, which backends are available and why others are not, and what to install."""
    from .doctor_report import examine

    with quiet_stdout(as_json):
        report = examine(store_path, threads=threads)
    if as_json:
        print_json(asdict(report))
    else:
        print_lines(*lines(report))


def lines(report: DoctorReport) -> list[str]:
    """Return the lines that ``gemmtune doctor`` prints."""
    target = report.target
    caches = ", ".join(
        f"{name} {_size(size)}" for name, size in zip(("L1d", "L2", "L3"), target["caches"], strict=False) if size
    )
    text = [
        f"machine    {target['name']}",
        f"           {report.cores} cores, torch uses {target['threads']} threads, {_size(target['memory'])} memory",
        f"caches     {caches or 'unknown'}",
        f"isa        {' '.join(target['isa']) or 'baseline'}",
        f"system     {report.system}",
        f"python     {report.python}",
        f"torch      {report.torch}",
    ]
    text += [f"  {name:<9}{version}" for name, version in target["versions"].items() if name != "torch"]
    text.append(f"openmp     {', '.join(report.openmp) or 'none loaded'}")
    for state in report.backends:
        text.append(f"backend    {state.name}: {'available' if state.available else 'not available: ' + state.reason}")
    for gpu in report.gpus:
        text += [
            f"gpu        {gpu.device}: {gpu.name}, capability {gpu.capability}, {gpu.cores} multiprocessors, "
            f"{_size(gpu.memory)} memory, driver {gpu.driver}"
        ]
        text += [f"  {state.name:<9}{'available' if state.available else state.reason}" for state in gpu.backends]
    if not report.gpus:
        text.append("gpu        none that torch can use")
    for name, path in report.tools.items():
        text.append(f"tool       {name}: {path or 'not found'}")
    health = "sound" if not report.store_damage else f"{len(report.store_damage)} damaged records"
    text.append(f"store      {report.store_path}: {report.store_decisions} decisions, {health}")
    text.append("")
    text += [f"- {line}" for line in report.advice] or ["nothing to do: everything is in place"]
    return text


def _size(count: int) -> str:
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"
