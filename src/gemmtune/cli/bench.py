"""``gemmtune bench``: race backends on shapes, keeping nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .common import (
    BackendsOption,
    BudgetOption,
    DeviceOption,
    DtypeOption,
    HotOption,
    JsonOption,
    LatencyOption,
    ThreadsOption,
    WorkloadOption,
    exit_on_error,
    fail,
    parse_backends,
    parse_device,
    parse_latency,
    plain_console,
    print_json,
    quiet_stdout,
    requested_problems,
    require_memory,
    selected_tuning_target,
)


@exit_on_error
def bench(
    shapes: Annotated[list[str] | None, typer.Argument(metavar="M,N,K", help="Shapes, e.g. 16,4096,11008.")] = None,
    workload: WorkloadOption = None,
    dtype: DtypeOption = "bf16",
    backends: BackendsOption = None,
    budget: BudgetOption = None,
    hot: HotOption = False,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    latency: LatencyOption = "graph",
    as_json: JsonOption = False,
) -> None:
    """Race the named backends on shapes, side by side in the same rounds. The store is neither read nor written."""
    from ..store import MemoryStore
    from .tune import run

    device_name, parsed_latency = parse_device(device), parse_latency(latency)
    names = parse_backends(backends, device_name)
    with quiet_stdout(as_json):
        problems = requested_problems(None, shapes or [], workload, dtype)
        target = selected_tuning_target(threads, device_name)
    if shapes:
        require_memory(problems, target)
    if not problems:
        fail("every one of these problems is empty (M, N or K is 0): there is nothing to race", as_json=as_json)
    board, interrupted = run(
        problems, device_name, names, MemoryStore(), budget=budget, hot=hot, hidden=as_json, latency=parsed_latency
    )
    if as_json:
        print_json(
            {
                "interrupted": interrupted,
                "threads": target.threads,
                "results": [_result_row(d) for d in board.decisions],
            }
        )
    elif board.decisions:
        from .tables import bench_table

        out = plain_console()
        out.print()
        out.print(bench_table(board.decisions, names))
    if interrupted or any(decision.outcome == "none_valid" for decision in board.decisions):
        raise typer.Exit(1)


def _result_row(decision: Any) -> dict[str, Any]:
    from ..report.rows import best_by_backend, summarize

    row = summarize(decision)
    backends = {
        name: {"kernel": best.id, "median_s": best.sample.median_s, "lo_s": best.sample.lo_s, "hi_s": best.sample.hi_s}
        for name, best in best_by_backend(decision).items()
        if best.sample is not None
    }
    return {
        "problem": decision.problem_key,
        "label": row.label,
        "outcome": row.outcome,
        "fastest": decision.chosen,
        "speedup": row.speedup,
        "speedup_lo": row.lo,
        "speedup_hi": row.hi,
        "backends": backends,
    }
