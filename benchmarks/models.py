"""Check and time models after ``gemmtune.optimize``: classes of transformers with small configurations and random
weights, torch.nn's transformers, PEFT's adapters and torchao's formats, in fp32 and bf16, on the CPU or a GPU.

PYTHONPATH=/tmp/hf .venv/bin/python benchmarks/models.py [--only llama bert] [--dtype fp32] [--time-only]

Each row runs in two processes (``model_checks.py``): one for the checks, with all linears packed that can be packed,
and one for the times of the model that ``optimize`` tunes. If a process dies or exceeds its time limit, this is the
outcome of the check that was running, and another process runs the remaining checks. Raw data is written after each
row, so that an interrupted run keeps its finished rows. A run with an existing --out replaces the rows of its models,
dtypes and parts; a row whose times are of another commit than the file's names that commit.
--docs FILE runs nothing: it writes the table of --out's data (by default the newest) between the comments
``models:begin`` and ``models:end`` of FILE (for data of a GPU: ``gpu-models:begin``). GEMMTUNE_MODELS_SCALE=8
multiplies all widths by eight. benchmarks/models-requirements.txt lists the packages to install.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import RESULTS, current_commit, describe_run
from model_zoo import CASES, SCALE, Case

from gemmtune.dispatch import current_target

Row = dict[str, Any]

CHECKS = (
    "outputs", "modes", "generate", "deepcopy", "pickle", "autocast", "profiler", "backward", "merge", "state",
    "export", "aoti", "compile", "restore",
)  # fmt: skip
# The slow checks (they run a C++ compiler) run by default only on these models, one of each architecture.
REPRESENTATIVE = (
    "llama", "gpt2", "qwen2-moe", "mamba2", "t5", "bert", "vit", "whisper", "nn.TransformerEncoder",
    "peft: adapters active", "torchao: Int8WeightOnly, nn.Sequential",
)  # fmt: skip
VERSIONS = ("torch", "transformers", "peft", "torchao", "accelerate", "tokenizers", "safetensors", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models, or kinds of models")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="one dtype instead of both")
    parser.add_argument("--checks-only", action="store_true", help="no times")
    parser.add_argument("--time-only", action="store_true", help="no checks")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="only these checks")
    parser.add_argument(
        "--aoti", choices=("some", "all", "none"), default="some", help="AOTInductor packages of [some]"
    )
    parser.add_argument(
        "--compile", choices=("some", "all", "none"), default="some", help="torch.compile of [some] models"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="time a forward in pairs for this long [3]")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds to tune one problem [1]")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one process [300]")
    parser.add_argument("--out", type=Path, help="raw data; an existing file is continued")
    parser.add_argument("--docs", type=Path, help="write the table into this page, and run nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--list", action="store_true", help="name the models")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{case.kind:<20}{name}" for name, case in CASES.items()))
    elif args.docs is not None:
        write_docs(args.docs, args.out or _newest_results())
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Run the selected rows; write the file after each."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit through `finally`, which ends the running process
    cases = [case for case in CASES.values() if not args.only or {case.name, case.kind, case.package} & set(args.only)]
    unknown = set(args.only or ()) - {word for case in CASES.values() for word in (case.name, case.kind, case.package)}
    if unknown or not cases:
        sys.exit(f"no model or kind is called {', '.join(sorted(unknown))}; --list names them")
    document = _open_document(args.out)
    if args.device == "cuda":
        document["gpu"] = current_target("cuda").to_dict()
    document["scale"] = SCALE
    path = args.out or Path(os.environ.get("OUT") or RESULTS) / f"models-{document['made']}.json"
    path.parent.mkdir(exist_ok=True)
    rows: list[Row] = document["rows"]
    for case in cases:
        for dtype in case.dtypes if args.dtype is None else (args.dtype,):
            row = next((row for row in rows if (row["name"], row["dtype"]) == (case.name, dtype)), None)
            if row is None:
                row = {"name": case.name, "kind": case.kind, "dtype": dtype, "checks": {}}
                rows.append(row)
            if not args.time_only:
                check(case, dtype, row, _selected_checks(args, case), args)
            if not args.checks_only and row.get("setup", {}).get("outcome", "ok") == "ok":
                measure(case, dtype, row, args)
            _write(path, document)
            print(_terminal_lines(row), flush=True)
    print(f"raw data: {path}")


def _selected_checks(args: argparse.Namespace, case: Case) -> list[str]:
    """Return the checks to run on this model; the slow ones depend on --aoti and --compile."""
    slow = {"aoti": args.aoti, "compile": args.compile}
    return [
        name
        for name in args.checks
        if slow.get(name, "all") == "all" or (slow[name] == "some" and case.name in REPRESENTATIVE)
    ]


def _open_document(out: Path | None) -> dict[str, Any]:
    if out is not None and out.exists():
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return document
    return {**describe_run("models"), "versions": versions(), "rows": []}


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries of VERSIONS."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the file atomically, so that an interrupted run leaves no partial file."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


# --- processes ---------------------------------------------------------------------------------------------------


def check(case: Case, dtype: str, row: Row, names: Sequence[str], args: argparse.Namespace) -> None:
    """Run the named checks. If a process dies or exceeds its time limit in one check, another process runs the
    remaining checks. This check is then run on the plain model, because the fault may be PyTorch's."""
    remaining = list(names)
    while remaining or "setup" not in row:
        reports, exit_text = _run_process([*_row_arguments(case, dtype, args), "--checks", *remaining], args.limit)
        open_check = _update_row(row, reports)
        if exit_text == "":
            return
        if open_check == "setup" or open_check is None:
            _, plain_exit = _run_process([*_row_arguments(case, dtype, args), "--plain"], args.limit)
            row["setup"] = {"outcome": "failed", "detail": exit_text}
            if plain_exit:
                row["setup"] = {"outcome": "not applicable", "detail": f"plain torch fails: {plain_exit}"}
            return
        outcome = {"outcome": "crashed" if "signal" in exit_text else "failed", "detail": exit_text}
        plain_check = [*_row_arguments(case, dtype, args), "--plain", "--checks", open_check]
        _, plain_exit = _run_process(plain_check, args.limit)
        if plain_exit:
            outcome = {"outcome": "not applicable", "detail": f"plain torch fails: {plain_exit}"}
        row["checks"][open_check] = outcome
        remaining = remaining[remaining.index(open_check) + 1 :]
        if not remaining:
            return


def measure(case: Case, dtype: str, row: Row, args: argparse.Namespace) -> None:
    """Tune the model and time forwards."""
    command = [*_row_arguments(case, dtype, args), "--seconds", str(args.seconds), "--budget", str(args.budget)]
    reports, exit_text = _run_process(command, 2 * args.limit)
    row.pop("time", None)
    row["timed_at"] = current_commit()
    _update_row(row, reports)
    if exit_text:
        row["time"] = {"outcome": "crashed" if "signal" in exit_text else "failed", "detail": exit_text}


def _row_arguments(case: Case, dtype: str, args: argparse.Namespace) -> list[str]:
    return ["--row", case.name, dtype, "--device", args.device]


def _run_process(arguments: Sequence[str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run ``model_checks.py``; return the lines that it reported and the text of its failure (empty: success)."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-models-") as folder:
        report, store = Path(folder) / "report.jsonl", Path(folder) / "store.db"
        arguments_with_report = [*arguments[:3], str(report), *arguments[3:]]  # the report is the third value of --row
        environment = {
            **os.environ,
            "GEMMTUNE_STORE": str(store),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": folder,
        }
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("model_checks.py")), *arguments_with_report], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=limit)
            exit_text = _exit_text(process.returncode, errors)
        except subprocess.TimeoutExpired:
            exit_text = f"took longer than {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # includes the processes and compilers that it started
                process.communicate()
        text = report.read_text(encoding="utf-8") if report.exists() else ""
    return [json.loads(line) for line in text.splitlines()], exit_text


def _exit_text(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"ended with {code}: {last[:300]}"


def _update_row(row: Row, reports: Sequence[Mapping[str, Any]]) -> str | None:
    """Put reported values into the row; return the check that started and did not end, if any."""
    open_check = None
    for line in reports:
        if "begin" in line:
            open_check = line["begin"]
        elif "add" in line:
            row.update(line["add"])
        else:
            result = {name: line[name] for name in ("outcome", "detail", "seconds")}
            if line["end"] in ("setup", "time"):
                row[line["end"]] = result
            else:
                row["checks"][line["end"]] = result
            open_check = None
    return open_check


# --- tables ------------------------------------------------------------------------------------------------------


def _terminal_lines(row: Row) -> str:
    """Return a row as text for the terminal: one line, and one more for each check that did not pass."""
    counts = Counter(outcome["outcome"] for outcome in row["checks"].values())
    served = f"{row['packed']['swapped']}/{row['linears']} linears packed" if "packed" in row else ""
    ratios = ", ".join(f"{name} {_ratio_text(result)}" for name, result in row.get("times", {}).items())
    tuned = f"  tuned: {row['tuned']['swapped']} packed" if "tuned" in row else ""
    counts_text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    lines = [f"{row['name']:<58}{row['dtype']:<6}{served:<26}{counts_text}{tuned}  {ratios}"]
    for part in ("setup", "time"):
        if row.get(part, {}).get("outcome", "ok") != "ok":
            lines.append(f"    {part}: {row[part]['outcome']}: {row[part]['detail']}")
    lines += [
        f"    {name}: {_outcome_text(result)}"
        for name, result in row["checks"].items()
        if result["outcome"] != "ok" and result["detail"] not in _EXPECTED_REASONS
    ]
    return "\n".join(lines)


_EXPECTED_REASONS = ("no adapters", "the class does not generate", "the forward takes no single floating input")


def _outcome_text(result: Mapping[str, Any]) -> str:
    return f"{result['outcome']}: {result['detail']}"


def _ratio_text(result: Mapping[str, Any]) -> str:
    return f"{result['ratio']:.2f} [{result['low']:.2f}-{result['high']:.2f}]"


def write_docs(page: Path, source: Path) -> None:
    """Replace the text between the page's two comments by the table of this raw data."""
    document = json.loads(source.read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    name = "gpu-models" if document.get("gpu") else "models"
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, begin_marker, rest = text.partition(begin)
    _, end_marker, tail = rest.partition(end)
    if not begin_marker or not end_marker:
        sys.exit(f"{page} has no {begin} and {end} to write between")
    page.write_text(f"{head}{begin}\n{chr(10).join(_table(document, source))}\n{end}{tail}", encoding="utf-8")
    print(f"wrote {page} from {source}")


def _table(document: Mapping[str, Any], source: Path) -> Iterator[str]:
    versions_text = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    machine = document.get("gpu", document["target"]).get("name", "")
    scale_text = f"; widths times {document['scale']}" if document.get("scale", 1) != 1 else ""
    yield f"`{source.name}`: {machine}; {versions_text}; commit `{document['commit'][:12]}`{scale_text}."
    for kind in dict.fromkeys(row["kind"] for row in document["rows"]):
        yield f"\n### {kind}\n"
        columns = "model", "dtype", "linears packed", "left, and why", "checks that hold", "others", "tuned: packed"
        yield f"| {' | '.join(columns)} | time over plain |"
        yield "|---" * 8 + "|"
        for row in document["rows"]:
            if row["kind"] == kind:
                yield _table_row(row, document["commit"])


def _table_row(row: Row, commit_of_file: str) -> str:
    if row.get("setup", {}).get("outcome", "ok") != "ok":
        return f"| {row['name']} | {row['dtype']} | | | | {_table_cell(_outcome_text(row['setup']))} | | |"
    packed = row.get("packed", {"swapped": 0, "left": {}})
    not_packed = "; ".join(f"{count}: {reason}" for reason, count in packed["left"].items())
    passed = [name for name, result in row["checks"].items() if result["outcome"] == "ok"]
    other_outcomes = [
        f"{name}: {result['detail']}"
        if result["outcome"] == "not applicable"
        else f"**{name}**: {_outcome_text(result)}"
        for name, result in row["checks"].items()
        if result["outcome"] != "ok" and result["detail"] not in _EXPECTED_REASONS
    ]
    if row.get("time", {}).get("outcome", "ok") != "ok":
        other_outcomes.append(f"**time**: {_outcome_text(row['time'])}")
    times = ", ".join(f"{name} {_ratio_text(result)}" for name, result in row.get("times", {}).items())
    if row.get("timed_at", commit_of_file) != commit_of_file:
        times += f" (at `{row['timed_at'][:8]}`)"
    cells = [
        row["name"], row["dtype"], f"{packed['swapped']} of {row.get('linears', '?')}", not_packed, ", ".join(passed),
        "; ".join(other_outcomes), _tuned_text(row), times,
    ]  # fmt: skip
    return "| " + " | ".join(_table_cell(cell) for cell in cells) + " |"


def _tuned_text(row: Row) -> str:
    """Return the number of linears that the tuned model packed, and the reasons against those that can be packed."""
    if "tuned" not in row:
        return ""
    before = row.get("packed", {}).get("left", {})
    reasons = [f"{count}: {reason}" for reason, count in row["tuned"]["left"].items() if reason not in before]
    return "; ".join([str(row["tuned"]["swapped"]), *reasons])


def _table_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _newest_results() -> Path:
    paths = sorted(RESULTS.glob("models-*.json"))
    if not paths:
        sys.exit(f"no raw data in {RESULTS}: run the benchmark first")
    return paths[-1]


if __name__ == "__main__":
    main()
