"""Mutations of stores and exports: of bytes, of JSON, of SQLite schemas and records, and of journals."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from gemmtune.core.candidate import Candidate
from gemmtune.store.schema import digest

_DEEP_MARK, _HUGE_MARK, _INVALID_MARK = "@@deep@@", "@@huge@@", "@@wild@@"
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.0, -0.0, 1e308, 5e-324, -1e-9,
    float("nan"), float("inf"), float("-inf"), "", "0", "x" * 10_000, "\ud800", "../../etc/passwd",
    "__import__('os')", "\x00", "aten", "native", "toy", "os", "winner", "tie", "none_valid", "exact", "within_bound",
    "wrong", [], {}, [[]], {"": ""}, [None], {"__class__": "x"}, {"backend": "os", "template": "system", "config": {}},
    {"backend": "toy", "template": "slow", "config": {"cls": 1}}, _DEEP_MARK, _HUGE_MARK, _INVALID_MARK,
)  # fmt: skip


def bytes_of(rng: random.Random, body: bytes) -> bytes:
    """Return the bytes with bits flipped, or with parts cut, copied or overwritten."""
    data = bytearray(body)
    kind = rng.randrange(7)
    if kind <= 1:
        for _ in range(1 if kind == 0 else rng.randint(1, 40)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[rng.randrange(len(data)) :]
    elif kind == 3:
        start = rng.randrange(len(data))
        del data[start : start + rng.randint(1, 5000)]
    elif kind == 4:
        start, source, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.randint(1, 4096)
        data[start : start + size] = data[source : source + size]
    elif kind == 5:
        start = rng.randrange(len(data))
        fill = rng.choice((b"\0", b"\xff", None))
        size = rng.randint(1, 4096)
        data[start : start + size] = rng.randbytes(size) if fill is None else fill * size
    else:  # the header of a database
        start = rng.randrange(min(100, len(data)))
        data[start] = rng.randrange(256)
    return bytes(data)


def tree_of(rng: random.Random, root: Any) -> Any:
    """Return JSON data with a few nodes replaced, dropped, exchanged or copied. Changes ``root``."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        nodes = list(_nodes(root))
        parent, key = rng.choice(nodes)
        kind = rng.randrange(5)
        if kind == 0:
            parent[key] = rng.choice(_LEAVES)
        elif kind == 1:
            del parent[key]
        elif kind == 2:  # the value of the same key elsewhere: another problem, another candidate, another verdict
            same_key_nodes = [(other, name) for other, name in nodes if name == key and isinstance(other, dict)]
            other, name = rng.choice(same_key_nodes or nodes)
            parent[key] = json.loads(json.dumps(other[name]))
        elif kind == 3:
            other, name = rng.choice(nodes)
            parent[key], other[name] = json.loads(json.dumps(other[name])), json.loads(json.dumps(parent[key]))
        elif isinstance(parent, dict):
            parent[rng.choice(("extra", "", "__proto__", "\ud800", "m", "id", "kind"))] = rng.choice(_LEAVES)
        else:
            parent.insert(key, json.loads(json.dumps(rng.choice(parent))))
    return root


def _nodes(node: Any) -> Any:
    """Yield (container, key or index) of every value below a node."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from _nodes(value)


def text_of(rng: random.Random, root: Any) -> bytes:
    """Return JSON text of the data, with deep nesting, numbers beyond any type, invalid tokens and duplicate keys."""
    text = json.dumps(root, ensure_ascii=rng.random() < 0.9)
    depth = rng.choice((10, 500, 2000, 100_000))
    opening, closing_ = rng.choice((("[", "]"), ('{"a":', "}")))
    text = text.replace(f'"{_DEEP_MARK}"', opening * depth + "0" + closing_ * depth)
    text = text.replace(
        f'"{_HUGE_MARK}"', rng.choice(("9" * 5000, "1e99999", "-1e99999", "1" + "0" * 30 + ".5", "1e-99999"))
    )
    text = text.replace(
        f'"{_INVALID_MARK}"', rng.choice(("01", "+1", "0x10", "nan", "'a'", "1,", "", "//", '"\\ud800"'))
    )
    if rng.random() < 0.15:
        name = rng.choice(("problem_key", "problem", "chosen", "verdict", "kind", "id", "candidate", "m", "version"))
        at = text.find(f'"{name}":', rng.randrange(len(text)))
        if at >= 0:
            leaf = json.dumps(
                rng.choice([leaf for leaf in _LEAVES if leaf not in (_DEEP_MARK, _HUGE_MARK, _INVALID_MARK)])
            )
            text = f'{text[:at]}"{name}": {leaf}, {text[at:]}'
    return text.encode("utf-8", "surrogatepass")


_SCHEMAS = (
    "DROP TABLE decisions", "DROP TABLE targets", "DROP TABLE leases", "DROP TABLE gemmtune_schema", "DROP TABLE plans",
    "DROP TABLE plans; UPDATE gemmtune_schema SET version = 2", "UPDATE gemmtune_schema SET version = 2",
    "UPDATE gemmtune_schema SET version = 99", "UPDATE gemmtune_schema SET version = 0",
    "UPDATE gemmtune_schema SET version = 'x'", "UPDATE gemmtune_schema SET version = 1", "DELETE FROM gemmtune_schema",
    "UPDATE gemmtune_schema SET version = 9223372036854775807", "INSERT INTO gemmtune_schema VALUES (1)",
    "CREATE TRIGGER t AFTER INSERT ON decisions BEGIN DELETE FROM decisions; END",
    "CREATE TRIGGER t AFTER INSERT ON leases BEGIN SELECT load_extension('x.so'); END",
    "CREATE VIEW v AS SELECT writefile('x', 'y')", "ALTER TABLE decisions ADD COLUMN more",
    "ALTER TABLE decisions RENAME TO old; CREATE VIEW decisions AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL "
    "SELECT x + 1 FROM n) SELECT x AS target_key, x AS problem_key, 0.0 AS created, '' AS digest, x'' AS body FROM n",
    "ALTER TABLE decisions RENAME TO old; CREATE VIEW decisions AS SELECT target_key, problem_key, created, digest, "
    "body FROM old", "CREATE INDEX i ON decisions (hex(body))", "PRAGMA user_version = 7", "PRAGMA journal_mode = WAL",
    "ALTER TABLE targets RENAME TO decisions2", "PRAGMA application_id = 1",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE decisions (x)' WHERE name = 'decisions'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 2",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET type = 'view'", "PRAGMA encoding = 'UTF-16'",
)  # fmt: skip
_TABLES = ("decisions", "failures", "targets", "leases", "plans")
_NAMES = (
    "target_key", "problem_key", "plan_key", "created", "digest", "body", "candidate_id", "key", "owner", "token",
    "expires",
)  # fmt: skip
_VALUES = (
    "NULL", "1", "-1", "9e999", "-9e999", "x'ff'", "x''", "''", "'x'", "CAST(x'ff' AS TEXT)", "CAST(x'eda080' AS TEXT)",
    "zeroblob(100000)", "problem_key || 'x'", "CAST(body AS TEXT)", "substr(body, 1, 99)", "upper(target_key)", "x'00'",
)  # fmt: skip


def database_of(rng: random.Random, path: Path) -> None:
    """Change a store's file with SQL: its schema, its columns, or its records together with their checksums."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY;")
        kind = rng.randrange(10)
        try:
            if kind == 0:
                connection.executescript(rng.choice(_SCHEMAS))
            elif kind == 1:
                sql = f"UPDATE {rng.choice(_TABLES)} SET {rng.choice(_NAMES)} = {rng.choice(_VALUES)}"
                connection.execute(sql)
            elif kind < 4:
                _rewrite_plan(rng, connection)
            else:
                _rewrite(rng, connection)
        except (sqlite3.Error, UnicodeError):
            pass  # SQLite refuses some of the changes: then the store is unchanged


def forge(rng: random.Random, tree: dict[str, Any]) -> dict[str, Any]:
    """Replace the winner by a random candidate in every field of a record, which stays consistent, and return it."""
    config = {
        rng.choice(("isa", "mr", "nr", "mc", "kc", "nc", "grid", "layout", "tag", "split", "cls", "self")): rng.choice(
            ("avx2", "avx512", "", "plain", 6, 16, 0, -1, 10**30, 1.5, True, "6", "../..", "x" * 500)
        )
        for _ in range(rng.randrange(5))
    }
    backend = rng.choice(("native", "native", "aten", "toy", "os", ""))
    template = rng.choice(("gemm", "gemm", "mm", "slow", "../x", "__init__"))
    try:
        name = Candidate.make(backend, template, **config).id
    except TypeError:
        return tree
    old = tree["chosen"]
    row = next(row for row in tree["evidence"] if row["id"] == old)
    row["id"], row["candidate"] = name, {"backend": backend, "template": template, "config": config}
    row["packing"] = rng.choice((None, row["packing"]))
    tree["chosen"], tree["alternatives"] = name, {}
    return tree


def _rewrite(rng: random.Random, connection: sqlite3.Connection) -> None:
    """Read all records, mutate them, and write one with a valid checksum."""
    rows = connection.execute("SELECT rowid, target_key, problem_key, body FROM decisions").fetchall()
    trees = [json.loads(body) for *_, body in rows]
    index = rng.randrange(len(rows))
    rowid, target_key, problem_key, _ = rows[index]
    kind = rng.random()
    if kind < 0.2:
        body = json.dumps(forge(rng, trees[index])).encode()
    elif kind < 0.4:  # the content of another record under this record's key
        body = json.dumps(rng.choice(trees)).encode()
        if rng.random() < 0.5:
            body = json.dumps({**json.loads(body), "problem_key": problem_key}).encode()
    else:
        mutated = tree_of(rng, trees)
        body = text_of(rng, mutated[min(index, len(mutated) - 1)] if isinstance(mutated, list) and mutated else mutated)
    if rng.random() < 0.2:
        problem_key = rng.choice(rows)[2] + rng.choice(("", "x"))
        connection.execute("DELETE FROM decisions WHERE problem_key = ? AND rowid <> ?", (problem_key, rowid))
    checksum = digest(target_key, problem_key, body)
    sql = "UPDATE decisions SET problem_key = ?, body = ?, digest = ? WHERE rowid = ?"
    connection.execute(sql, (problem_key, body, checksum, rowid))


def _rewrite_plan(rng: random.Random, connection: sqlite3.Connection) -> None:
    """Mutate a plan, and write it with a valid checksum."""
    rows = connection.execute("SELECT rowid, target_key, plan_key, body FROM plans").fetchall()
    rowid, target_key, plan_key, stored = rng.choice(rows)
    body = text_of(rng, tree_of(rng, json.loads(stored)))
    sql = "UPDATE plans SET body = ?, digest = ? WHERE rowid = ?"
    connection.execute(sql, (body, digest(target_key, plan_key, body), rowid))


def journal_of(rng: random.Random, database: bytes) -> bytes:
    """Return a rollback journal: random bytes, or a valid header with mutated pages."""
    if rng.random() < 0.5:
        return rng.randbytes(rng.randint(1, 6000))
    nonce, pages, size = rng.randrange(2**32), len(database) // 4096, 4096
    count = rng.randint(1, 3)
    header = bytes.fromhex("d9d505f920a163d7") + b"".join(
        number.to_bytes(4, "big") for number in (count, nonce, pages, 512, size)
    )
    out = header.ljust(512, b"\0")
    for _ in range(count):
        page = bytes_of(rng, database[: size * max(1, pages)])[:size].ljust(size, b"\0")
        total = (nonce + sum(page[offset] for offset in range(size - 200, 0, -200))) % 2**32
        out += rng.randint(1, max(1, pages)).to_bytes(4, "big") + page + total.to_bytes(4, "big")
    return out
