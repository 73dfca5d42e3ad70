"""What becomes of models when ``gemmtune.optimize`` takes them: classes of transformers with small configurations and
random weights, torch.nn's transformers, PEFT's adapters and torchao's formats; fp32 and bf16, on the CPU or a GPU.

PYTHONPATH=/tmp/hf .venv/bin/python benchmarks/models.py [--only llama bert] [--dtype fp32] [--time-only]

Each row runs in processes of its own (``model_checks.py``): one for the checks, with every linear packed that can be,
and one for the times, of the model as ``optimize`` tunes it. A process that dies or takes too long is an outcome of the
check that it was at; the other checks go on in another process. Raw data is written after each row, so that a run which
is cut keeps what it has, and a run with the same --out replaces rows of that model, dtype and part (a row whose times
are of another commit than the file says so).
--docs FILE writes the table of --out's data (by default the newest) between FILE's two comments ``models:begin`` and
``models:end`` (of a GPU's data: ``gpu-models:begin``), and runs nothing. GEMMTUNE_MODELS_SCALE=8 makes widths and inner
widths eight times as large. benchmarks/models-requirements.txt says what to install.
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

from harness import RESULTS, commit, header
from model_zoo import CASES, SCALE, Case

from gemmtune.dispatch import current_target

Row = dict[str, Any]

CHECKS = (
    "outputs", "modes", "generate", "deepcopy", "pickle", "autocast", "profiler", "backward", "merge", "state",
    "export", "aoti", "compile", "restore",
)  # fmt: skip
# Slow (a C++ compiler runs): by default for models that are unlike each other.
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
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="these checks alone")
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
        write_docs(args.docs, args.out or _newest())
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    """Run the rows that were asked for, and keep each as it ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended as well
    cases = [case for case in CASES.values() if not args.only or {case.name, case.kind, case.package} & set(args.only)]
    unknown = set(args.only or ()) - {word for case in CASES.values() for word in (case.name, case.kind, case.package)}
    if unknown or not cases:
        sys.exit(f"no model or kind is called {', '.join(sorted(unknown))}; --list names them")
    document = _document(args.out)
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
                check(case, dtype, row, _chosen(args, case), args)
            if not args.checks_only and row.get("setup", {}).get("outcome", "ok") == "ok":
                measure(case, dtype, row, args)
            _write(path, document)
            print(_line(row), flush=True)
    print(f"raw data: {path}")


def _chosen(args: argparse.Namespace, case: Case) -> list[str]:
    """The checks of this model: the slow ones where they were asked for."""
    slow = {"aoti": args.aoti, "compile": args.compile}
    return [
        name
        for name in args.checks
        if slow.get(name, "all") == "all" or (slow[name] == "some" and case.name in REPRESENTATIVE)
    ]


def _document(out: Path | None) -> dict[str, Any]:
    if out is not None and out.exists():
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found
    return {**header("models"), "versions": versions(), "rows": []}


def versions() -> dict[str, str]:
    """The versions of the libraries that models come from; those that are absent are left out."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the file as a whole, so that a cut run leaves no half of one."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


# --- processes ---------------------------------------------------------------------------------------------------


def check(case: Case, dtype: str, row: Row, names: Sequence[str], args: argparse.Namespace) -> None:
    """Run the named checks. After a process that died or took too long at one check, another runs those that remain;
    the plain model is tried alone at the check that failed so, as it may be torch that dies."""
    left = list(names)
    while left or "setup" not in row:
        lines, ended = _process([*_named(case, dtype, args), "--checks", *left], args.limit)
        at = _take(row, lines)
        if ended == "":
            return
        if at == "setup" or at is None:
            _, theirs = _process([*_named(case, dtype, args), "--plain"], args.limit)
            row["setup"] = {"outcome": "failed", "detail": ended}
            if theirs:
                row["setup"] = {"outcome": "not applicable", "detail": f"plain torch fails: {theirs}"}
            return
        outcome = {"outcome": "crashed" if "signal" in ended else "failed", "detail": ended}
        _, theirs = _process([*_named(case, dtype, args), "--plain", "--checks", at], args.limit)
        if theirs:
            outcome = {"outcome": "not applicable", "detail": f"plain torch fails: {theirs}"}
        row["checks"][at] = outcome
        left = left[left.index(at) + 1 :]
        if not left:
            return


def measure(case: Case, dtype: str, row: Row, args: argparse.Namespace) -> None:
    """Tune the model and time whole forwards."""
    command = [*_named(case, dtype, args), "--seconds", str(args.seconds), "--budget", str(args.budget)]
    lines, ended = _process(command, 2 * args.limit)
    row.pop("time", None)
    row["timed_at"] = commit()
    _take(row, lines)
    if ended:
        row["time"] = {"outcome": "crashed" if "signal" in ended else "failed", "detail": ended}


def _named(case: Case, dtype: str, args: argparse.Namespace) -> list[str]:
    return ["--row", case.name, dtype, "--device", args.device]


def _process(arguments: Sequence[str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """The lines that a process of ``model_checks.py`` reported, and how it ended (empty: well)."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-models-") as folder:
        report, store = Path(folder) / "report.jsonl", Path(folder) / "store.db"
        named = [*arguments[:3], str(report), *arguments[3:]]  # behind --row NAME DTYPE
        environment = {
            **os.environ,
            "GEMMTUNE_STORE": str(store),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": folder,
        }
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("model_checks.py")), *named], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=limit)
            ended = _how(process.returncode, errors)
        except subprocess.TimeoutExpired:
            ended = f"took longer than {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the fresh processes and compilers that it started as well
                process.communicate()
        text = report.read_text(encoding="utf-8") if report.exists() else ""
    return [json.loads(line) for line in text.splitlines()], ended


def _how(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"ended with {code}: {last[:300]}"


def _take(row: Row, lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Put what was reported into the row. Returns the check that began last, if it did not end."""
    open_check = None
    for line in lines:
        if "begin" in line:
            open_check = line["begin"]
        elif "add" in line:
            row.update(line["add"])
        else:
            found = {name: line[name] for name in ("outcome", "detail", "seconds")}
            if line["end"] in ("setup", "time"):
                row[line["end"]] = found
            else:
                row["checks"][line["end"]] = found
            open_check = None
    return open_check


# --- tables ------------------------------------------------------------------------------------------------------


def _line(row: Row) -> str:
    """One line of the terminal for a row, and one more for each check that is not well."""
    counts = Counter(outcome["outcome"] for outcome in row["checks"].values())
    served = f"{row['packed']['swapped']}/{row['linears']} linears packed" if "packed" in row else ""
    ratios = ", ".join(f"{name} {_ratio(found)}" for name, found in row.get("times", {}).items())
    tuned = f"  tuned: {row['tuned']['swapped']} packed" if "tuned" in row else ""
    words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    lines = [f"{row['name']:<58}{row['dtype']:<6}{served:<26}{words}{tuned}  {ratios}"]
    for part in ("setup", "time"):
        if row.get(part, {}).get("outcome", "ok") != "ok":
            lines.append(f"    {part}: {row[part]['outcome']}: {row[part]['detail']}")
    lines += [f"    {name}: {_told(found)}" for name, found in row["checks"].items() if found["outcome"] != "ok"
              and found["detail"] not in _UNSURPRISING]  # fmt: skip
    return "\n".join(lines)


_UNSURPRISING = ("no adapters", "the class does not generate", "the forward takes no single floating input")


def _told(found: Mapping[str, Any]) -> str:
    return f"{found['outcome']}: {found['detail']}"


def _ratio(found: Mapping[str, Any]) -> str:
    return f"{found['ratio']:.2f} [{found['low']:.2f}-{found['high']:.2f}]"


def write_docs(page: Path, source: Path) -> None:
    """Replace what is between the page's two comments by the table of this raw data."""
    document = json.loads(source.read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    name = "gpu-models" if document.get("gpu") else "models"
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        sys.exit(f"{page} has no {begin} and {end} to write between")
    page.write_text(f"{head}{begin}\n{chr(10).join(_table(document, source))}\n{end}{tail}", encoding="utf-8")
    print(f"wrote {page} from {source}")


def _table(document: Mapping[str, Any], source: Path) -> Iterator[str]:
    told = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    machine = document.get("gpu", document["target"]).get("name", "")
    wide = f"; widths times {document['scale']}" if document.get("scale", 1) != 1 else ""
    yield f"`{source.name}`: {machine}; {told}; commit `{document['commit'][:12]}`{wide}."
    for kind in dict.fromkeys(row["kind"] for row in document["rows"]):
        yield f"\n### {kind}\n"
        columns = "model", "dtype", "linears packed", "left, and why", "checks that hold", "others", "tuned: packed"
        yield f"| {' | '.join(columns)} | time over plain |"
        yield "|---" * 8 + "|"
        for row in document["rows"]:
            if row["kind"] == kind:
                yield _row(row, document["commit"])


def _row(row: Row, commit_of_file: str) -> str:
    if row.get("setup", {}).get("outcome", "ok") != "ok":
        return f"| {row['name']} | {row['dtype']} | | | | {_cell(_told(row['setup']))} | | |"
    packed = row.get("packed", {"swapped": 0, "left": {}})
    left = "; ".join(f"{count}: {reason}" for reason, count in packed["left"].items())
    well = [name for name, found in row["checks"].items() if found["outcome"] == "ok"]
    others = [f"**{name}**: {_told(found)}" if found["outcome"] != "not applicable" else f"{name}: {found['detail']}"
              for name, found in row["checks"].items()
              if found["outcome"] != "ok" and found["detail"] not in _UNSURPRISING]  # fmt: skip
    if row.get("time", {}).get("outcome", "ok") != "ok":
        others.append(f"**time**: {_told(row['time'])}")
    times = ", ".join(f"{name} {_ratio(found)}" for name, found in row.get("times", {}).items())
    if row.get("timed_at", commit_of_file) != commit_of_file:
        times += f" (at `{row['timed_at'][:8]}`)"
    cells = [
        row["name"], row["dtype"], f"{packed['swapped']} of {row.get('linears', '?')}", left, ", ".join(well),
        "; ".join(others), _tuned(row), times,
    ]  # fmt: skip
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _tuned(row: Row) -> str:
    """How many linears ``optimize`` packed of its own accord, and why it left others that can be packed."""
    if "tuned" not in row:
        return ""
    before = row.get("packed", {}).get("left", {})
    reasons = [f"{count}: {reason}" for reason, count in row["tuned"]["left"].items() if reason not in before]
    return "; ".join([str(row["tuned"]["swapped"]), *reasons])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _newest() -> Path:
    found = sorted(RESULTS.glob("models-*.json"))
    if not found:
        sys.exit(f"no raw data in {RESULTS}: run the benchmark first")
    return found[-1]


if __name__ == "__main__":
    main()
