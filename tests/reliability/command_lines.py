"""Random command lines of users, scripts and attackers, and the directory in which they run."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.store import open_store
from helpers.factories import make_decision, make_target

# fmt: off
STORES = (
    "good.db", "new.db", "", ".", "..", "dir", "dir/new.db", "a/b/new.db", "fifo", "loop", "dangling", "empty.db",
    "garbage.db", "foreign.db", "cut.db", "flipped.db", "newer.db", "notes.txt", ":memory:", "~nobody-here/x.db",
    "gr\u00f6\u00dfe \u2603.db", "bad\udcff.db", "line\nbreak.db", "x" * 300, "-", "file:good.db?mode=ro", "'; DROP",
    "notes.txt/x.db", "~", "/proc/nope/x.db", "good.db/", "./good.db", "../up.db",
)
SIZES = (
    "0", "1", "2", "3", "8", "17", "-1", "-0", "+4", "08", "1_0", "0x8", "1.5", "1e3", "nan", "inf", "", " 4",
    "\u0663", "2147483647", "2147483648", "9999999999", "9999999999999999999999999999999999999999", "9" * 5000,
    "None", "\u2603", "\udcff",
)
SHAPES = (
    "1,2,3", "8x8x8", "4,16,8", "8,8,0", "0x5x3", "9999999999x1x1", "-1x2x3", "1x2", "axbxc", "", ",,", "1,2,3,4",
    "2147483647,2147483647,1", "1,1,2147483647", "8,8,999999999", "8X8X8", " 8, 8, 8", "8;8;8", "1e2,2,3",
    "\u2603x1x1", "\udcffx1x1", "9" * 5000 + ",1,1", "--", "-", "1x-2x3", "3,3,3,", "\u0661,\u0662,\u0663",
)
MODELS = (
    "model.py:factory", "model.py:nothing", "model.py:several", "model.py:", ":factory", ":", "::", "bad.py:factory",
    "dir.py:factory", "fifo.py:factory", "absent.py:f", "no.such.module:f", "..:f", ".x:f", "model.py:leaves",
    "a b:c", "\u2603:f", "\udcff:f", "\udcff.py:f", "x" * 300 + ".py:f", "json:loads", "math:pi", "model.py:wrong",
    "model.py:__name__",
)
DTYPES = (
    "fp32", "bf16", "fp16", "fp64", "int8", "int8wo", "int4wo", "fp8", "", "FP32", "int8 ", "\u2603", "\udcff",
    "x" * 9999,
)
BUDGETS = (
    "0.05", "0.06", "1", "0", "-1", "nan", "inf", "-inf", "1e309", "1e-9", "", "six", "86401", "\u2603",
)
THREADS = (
    "1", "2", "0", "-1", "4096", "4097", "999999999999", "1.5", "", "two", "nan",
)
BACKENDS = (
    "aten", "native", "aten,native", "native,native", "", ",", "nope", "aten,nope", " native ", "*", "\u2603",
    "\udcff",
)
WORKLOADS = (
    "odd", "dynamic", "llama-small", "llama", "", "lama", "\u2603", "\udcff", "ODD",
)
IDS = (
    "", "a", "0", "1", "f", "zz", "mm|m1", "*", "%", "\udcff", "x" * 9999,
)
FILES = (
    "out.json", "export.json", "bad.json", "deep.json", "dir", "fifo", "loop", "dangling", "", ".", "notes.txt",
    "a/b.json", "bad\udcff.json", "x" * 300, "good.db", "gr\u00f6\u00dfe.json", "/proc/nope/x", "nan.json",
    "~/x.json", "-",
)
PAGES = (
    "out.html", "dir", "fifo", "loop", "dangling", "", ".", "absent/out.html", "bad\udcff.html", "x" * 300,
    "/proc/nope/x", "-",
)
AGES = (
    "0", "1", "90", "1e300", "-1", "nan", "inf", "-inf", "", "old", "1e-300",
)
# fmt: on

# Each command: the number of its positional arguments (lines may have more or fewer), their values, and its options.
COMMON = {"--store": STORES, "--json": None}
COMMANDS: dict[tuple[str, ...], tuple[int, Sequence[str], dict[str, Sequence[str] | None]]] = {
    ("tune",): (1, (*SHAPES, *SHAPES, *MODELS), {
        "--workload": WORKLOADS, "--dtype": DTYPES, "--bias": None, "--backends": BACKENDS, "--budget": BUDGETS,
        "--threads": THREADS, "--force": None, "--hot": None,
    }),
    ("bench",): (1, SHAPES, {
        "--workload": WORKLOADS, "--dtype": DTYPES, "--backends": BACKENDS, "--budget": BUDGETS, "--threads": THREADS,
    }),
    ("explain",): (3, SIZES, {"--dtype": DTYPES, "--threads": THREADS, "--any-machine": None}),
    ("report",): (0, PAGES, {"--output": PAGES, "-o": PAGES, "--all-machines": None}),
    ("doctor",): (0, SIZES, {"--threads": THREADS}),
    ("store", "ls"): (0, IDS, {}),
    ("store", "show"): (1, IDS, {}),
    ("store", "export"): (1, FILES, {"--here": None}),
    ("store", "import"): (1, FILES, {}),
    ("store", "prune"): (0, AGES, {"--others": None, "--older-than": AGES, "--threads": THREADS}),
    ("store", "verify"): (0, IDS, {}),
}  # fmt: skip
UNUSUAL_COMMANDS = (
    ("store",),
    ("stor",),
    ("",),
    ("--",),
    ("\u2603",),
    ("\udcff",),
    ("tune", "tune"),
    ("-h",),
    ("--version",),
    (),
)
UNUSUAL_TOKENS = (
    "--help",
    "--json",
    "--",
    "-",
    "--nope",
    "-x",
    "--store",
    "--json=1",
    "--jso",
    "",
    "\udcff",
    "--version",
    "-o",
    "=",
)


def lines(seed: int) -> Iterator[list[str]]:
    """Yield the arguments of random command lines without end, equal for equal seeds. A third are valid."""
    rng = random.Random(seed)
    while True:
        if rng.random() < 0.03:
            yield [*rng.choice(UNUSUAL_COMMANDS), *rng.sample(UNUSUAL_TOKENS, rng.randrange(3))]
        else:
            yield _line(rng)


def _line(rng: random.Random) -> list[str]:
    """Return a command with random arguments."""
    command, (count, values, options) = rng.choice(list(COMMANDS.items()))
    is_valid = rng.random() < 0.35
    all_options = {**options, **COMMON}
    chunks = [
        _option(rng, name, all_options[name], is_valid) for name in rng.choices(list(all_options), k=rng.randrange(5))
    ]
    if not is_valid and rng.random() < 0.3:
        count += rng.choice((-1, 1, 2))
    positional = [_value(rng, values, is_valid) for _ in range(max(0, count))]
    for value in positional:
        chunks.insert(rng.randrange(len(chunks) + 1), [value])
    tokens = [token for chunk in chunks for token in chunk]
    if not is_valid and rng.random() < 0.2:
        _mutate_tokens(rng, tokens)
    return [*command, *tokens]


def _option(rng: random.Random, name: str, values: Sequence[str] | None, is_valid: bool) -> list[str]:
    if values is None:
        return [name]
    value = _value(rng, values, is_valid)
    return [f"{name}={value}"] if name.startswith("--") and rng.random() < 0.2 else [name, value]


def _value(rng: random.Random, values: Sequence[str], is_valid: bool) -> str:
    return rng.choice(values[:2] if is_valid else values)


def _mutate_tokens(rng: random.Random, tokens: list[str]) -> None:
    """Insert, drop, repeat or cut a token."""
    index = rng.randrange(len(tokens) + 1)
    kind = rng.randrange(4) if index < len(tokens) else 0
    if kind == 0:
        tokens.insert(index, rng.choice(UNUSUAL_TOKENS))
    elif kind == 1:
        del tokens[index]
    elif kind == 2:
        tokens.insert(index, tokens[index])
    else:
        tokens[index] = tokens[index][: rng.randrange(len(tokens[index]) + 1)]


MODEL = """
import torch

def factory(dtype="fp32"):
    return torch.nn.Linear(8, 8, bias=False), (torch.ones(4, 8),)

def several():
    return torch.nn.Linear(8, 4), [(torch.ones(1, 8),), torch.ones(3, 8)]

def nothing():
    return None

def wrong():
    return torch.nn.Linear(8, 4), (torch.ones(1, 9),)

def leaves():
    raise SystemExit(3)
"""


class Folder:
    """Directory in which command lines run, with every file that ``lines`` names. ``restore`` creates it anew."""

    def __init__(self, root: Path, target: Target) -> None:
        self.root, self.path = root, root / "here"
        self._files = _files(root / "making", target)
        self.restore()

    def restore(self) -> None:
        """Restore every file, and remove new ones."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self.root.iterdir():
            path.unlink()
        self.path.mkdir()
        os.chdir(self.path)
        for name, data in self._files.items():
            Path(name).write_bytes(data)
        for name in ("dir", "dir.py"):
            Path(name).mkdir()
        for name in ("fifo", "fifo.py"):
            os.mkfifo(name)
        os.symlink("loop", "loop")
        os.symlink("nowhere/at-all", "dangling")
        self._original_state = self._state()

    def changes(self) -> list[str]:
        """Return the paths (relative to ``path``) that were created, deleted or changed since ``restore``."""
        state = self._state()
        return [
            os.path.relpath(path, self.path)
            for path in self._original_state.keys() | state.keys()
            if self._original_state.get(path) != state.get(path)
        ]

    def _state(self) -> dict[str, tuple[int, int, int]]:
        """Return mode, size and modification time of every path below the root (of directories the mode alone)."""
        state = {}
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                status = os.lstat(path := os.path.join(folder, name))
                is_folder = name in folders
                state[path] = (
                    status.st_mode,
                    0 if is_folder else status.st_size,
                    0 if is_folder else status.st_mtime_ns,
                )
        return state


def _files(folder: Path, target: Target) -> dict[str, bytes]:
    """Return the content of every file by its name. They are made in a new directory, which is removed again."""
    folder.mkdir()
    store = open_store(folder / "good.db")
    for m, n, k, dtype, outcome in (
        (8, 8, 8, "bf16", "winner"),
        (1, 2, 3, "fp32", "tie"),
        (3, 8, 8, "int8", "none_valid"),
    ):
        store.put(target, make_decision(build(m, n, k, dtype), outcome, target))
    other = make_target(threads=64, name="Another \u2603 <b>CPU</b> [bold]")
    store.put(other, make_decision(build(2, 2, 2, "fp32"), "winner", other))
    store.export(folder / "export.json")
    store.close()
    good = (folder / "good.db").read_bytes()
    for name, statement in (
        ("foreign.db", "CREATE TABLE theirs (x)"),
        ("newer.db", "UPDATE gemmtune_schema SET version = 99"),
    ):
        (folder / name).write_bytes(good if name == "newer.db" else b"")
        with closing(sqlite3.connect(folder / name)) as connection, connection:
            connection.execute(statement)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    exported = files["export.json"]
    return files | {
        "empty.db": b"", "garbage.db": random.Random(1).randbytes(5000),
        "cut.db": good[: len(good) // 2],
        "flipped.db": bytes(byte ^ (i % 977 == 976) for i, byte in enumerate(good)),
        "notes.txt": b"remember the milk\n",
        "bad.json": exported[: len(exported) // 2], "deep.json": b"[" * 100_000,
        "nan.json": json.dumps({"format": "gemmtune-decisions", "version": float("nan")}).encode(),
        "model.py": MODEL.encode(), "bad.py": b"1 / 0\n",
    }  # fmt: skip
