"""How much of an Epilogue an ATen op can take into itself, and when rounding before the rest is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...core.epilogue import Epilogue, Step
from ...core.problem import Problem

# Not relu: oneDNN's turns NaN into 0 (verification found it); it commutes with rounding and is applied afterwards.
_MKLDNN_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
WIDE = ("float32", "float64", "int32")


@dataclass(frozen=True, slots=True)
class Fused:
    """A prefix of the epilogue that one op computes: ``act(alpha * A @ B + beta * t)``, then ``binary`` with a
    full-sized tensor. ``steps`` counts the consumed steps, ``tensors`` the tensors they took."""

    alpha: float = 1.0
    beta: float = 0.0
    axis: str = ""
    activation: tuple[str, str] = ("none", "")
    scalars: tuple[float, ...] = ()
    binary: str = ""
    steps: int = 0
    tensors: int = 0


def addmm_prefix(problem: Problem) -> Fused:
    """``scale by a number``? then ``bias/add``?: what addmm's alpha and beta express. Tensors of A's dtype only."""
    epilogue, alpha, used = problem.epilogue, 1.0, 0
    if epilogue and epilogue[0].kind == "scale" and not epilogue[0].takes_tensor:
        alpha, used = epilogue[0].value, 1
    if len(epilogue) > used and _adds(epilogue[used], (problem.a.dtype,)):
        step = epilogue[used]
        return Fused(alpha, step.value, step.axis, steps=used + 1, tensors=1)
    # Scaling alone is cheaper outside than through addmm with a zero it has to make.
    return Fused()


def mkldnn_prefix(problem: Problem) -> Fused:
    """``bias``? then one activation, residual add or multiply?: what oneDNN's linear takes as post-ops."""
    epilogue, used, beta = problem.epilogue, 0, 0.0
    kinds = (problem.a.dtype, "float32")
    if epilogue and _adds(epilogue[0], kinds) and epilogue[0].axis == "col" and epilogue[0].value == 1.0:
        used, beta = 1, 1.0
    common: dict[str, Any] = {"beta": beta, "axis": "col" if used else ""}
    if len(epilogue) == used:
        return Fused(**common, steps=used, tensors=used)
    step = epilogue[used]
    if step.kind in _MKLDNN_ACTIVATIONS:
        return Fused(**common, activation=_MKLDNN_ACTIVATIONS[step.kind], steps=used + 1, tensors=used)
    full = step.axis == "full" and step.value == 1.0 and step.dtype == problem.a.dtype
    if full and step.kind in ("add", "mul"):
        return Fused(**common, binary=step.kind, steps=used + 1, tensors=used + 1)
    return Fused(**common, steps=used, tensors=used)


def _adds(step: Step, dtypes: tuple[str, ...]) -> bool:
    return step.kind in ("bias", "add") and step.takes_tensor and step.dtype in dtypes


def rest_after(problem: Problem, natural: str, fused: Fused) -> tuple[Epilogue | None, str]:
    """The steps left once ``fused`` is done in an op whose output is ``natural``, or None and the reason.

    Rounding to a narrow dtype with steps still to come (or a wider output) is an error the bound does not allow,
    unless the next step is a cast to just that dtype, or nothing but relu follows (rounding keeps signs).
    """
    rest = problem.epilogue[fused.steps :]
    if natural in WIDE:
        return rest, ""
    if rest and rest[0].kind == "cast" and rest[0].dtype == natural:
        return rest[1:], ""
    if problem.out_dtype == natural and all(step.kind == "relu" for step in rest):
        return rest, ""
    then = f"the epilogue step {rest[0].key}" if rest else f"{problem.out_dtype} output"
    return None, f"rounds to {natural} before {then}"
