"""Private names of torch are in one module, which has fall-backs for names that a version lacks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gemmtune.core import torch_compat

SOURCES = Path(__file__).parents[2] / "src" / "gemmtune"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def path_of(node: ast.expr, names: dict[str, str]) -> str:
    """Return the dotted path below torch that an expression names, or "". ``names`` maps local names to such paths."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = path_of(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        owner, name = path_of(node.args[0], names), node.args[1]
        return f"{owner}.{name.value}" if owner and isinstance(name, ast.Constant) else ""
    return ""


def private_names(source: str) -> list[str]:
    """Return the paths of the private names of torch that a module's source uses."""
    tree, names, paths = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    paths.append(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                paths.append(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):  # _aten = torch.ops.aten
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and path_of(node.value, names):
            names[node.targets[0].id] = path_of(node.value, names)
    paths += [path_of(node, names) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Call)]
    return sorted({path for path in paths if any(map(is_private, path.split(".")))})


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._len_torch_dispatch_stack()",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils._pytree import tree_map",
        "from torch import Tensor\nTensor._make_subclass(1)",
        "import torch\n_aten = torch.ops.aten\n_aten._to_copy.default",
        "import torch\nf = getattr(torch._C, '_increment_version', None)",
        "import torch._dynamo",
        "def f():\n    import torch\n    return torch._int_mm",
    ],
)
def test_private_names_are_detected(source: str) -> None:
    assert private_names(source)


def test_public_names_are_not_reported() -> None:
    assert not private_names("import torch\nfrom torch import nn\nx = nn.Linear(1, 1)\nx._parameters\ntorch.mm(x, x)")


def test_private_names_of_torch_are_used_in_torch_compat_only() -> None:
    used = {
        str(path.relative_to(SOURCES)): private_names(path.read_text(encoding="utf-8"))
        for path in SOURCES.rglob("*.py")
        if path.name != "torch_compat.py" and path.parts[-2:] != ("inductor", "hooks.py")  # Inductor's are there
    }
    assert {path: names for path, names in used.items() if names} == {}


# Script that runs without the names of OPTIONAL, which have a fall-back.
FALLBACK_SCRIPT = """
import torch, gemmtune
from gemmtune.dispatch.guards import make_guard
a, b, out = torch.randn(5, 24), torch.randn(24, 32), torch.empty(5, 32)
for _ in range(3):  # the first call, and those that find what was prepared
    torch.testing.assert_close(gemmtune.mm(a, b), a @ b)
    before = out._version
    torch.testing.assert_close(gemmtune.mm(a, b, out=out), a @ b)
    assert out._version > before
    packed = gemmtune.pack(b.t())
    torch.testing.assert_close(gemmtune.mm(a, packed), a @ b)
check = make_guard(a)
assert check(a.clone()) and not check(a.double()) and not check(a[:2])
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert gemmtune.mm(a, b).dtype == torch.bfloat16
assert gemmtune.mm(a, b).dtype == torch.float32
weight = torch.randint(-9, 9, (32, 32), dtype=torch.int8)
x, scale = torch.randn(3, 32), torch.rand(32)
torch.testing.assert_close(gemmtune.mixed_mm(x, weight.t(), scale), x @ weight.t().float() * scale)
"""


OPTIONAL = (
    "_C._dynamo.guards.TensorGuards", "_C._dynamo.guards._empty_strided_cpu", "_C._increment_version",
    "_C._is_any_autocast_enabled", "_weight_int8pack_mm",
)  # fmt: skip


def run_without(paths: Sequence[str], code: str) -> subprocess.CompletedProcess[str]:
    script = "\n".join(["import torch", *(f"del torch.{path}" for path in paths), code])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def test_fallbacks_of_missing_names_compute_equal_results() -> None:
    process = run_without(OPTIONAL, FALLBACK_SCRIPT)
    assert process.returncode == 0, process.stderr


def test_missing_required_name_raises_import_error_with_the_tested_versions() -> None:
    process = run_without(["_C._dispatch_keys"], "import gemmtune\ngemmtune.mm")
    assert process.returncode == 1
    (error,) = [line for line in process.stderr.splitlines() if line.startswith("ImportError")]
    assert "torch._C._dispatch_keys" in error
    assert torch.__version__ in error
    assert all(version in error for version in torch_compat.TESTED)


def test_candidate_whose_operator_is_missing_is_illegal(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.backends.aten.quantized import Int8Pack
    from gemmtune.core.workloads import build

    problem = build(4, 64, 64, "int8wo")
    assert Int8Pack.why_illegal(problem, {}) == ""
    monkeypatch.setattr(torch_compat, "weight_int8pack_mm", None)
    assert Int8Pack.why_illegal(problem, {}) == f"torch {torch.__version__} has no operator _weight_int8pack_mm"
