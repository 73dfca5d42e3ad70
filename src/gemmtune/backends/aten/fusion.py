"""Which prefix of an Epilogue an ATen op can compute itself, and when rounding before the remaining steps is
allowed."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.epilogue import Epilogue, Step
from ...core.problem import Problem

# relu is not listed: oneDNN's relu turns NaN into 0 (verification detected it). relu commutes with rounding, so that
# it is applied afterwards.
_MKLDNN_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", "")}
WIDE = ("float32", "float64", "int32")


class Fused(NamedTuple):
    """The prefix of the epilogue that one op computes: ``act(alpha * A @ B + beta * t)``, then ``binary`` with a tensor
    of the output's shape.

    axis: the axis of ``t``; empty without one. activation: oneDNN's name of the activation, and its algorithm. binary:
    add or mul; empty without one. steps: how many steps the prefix has. tensors: how many tensors these steps take.
    """

    alpha: float = 1.0
    beta: float = 0.0
    axis: str = ""
    activation: tuple[str, str] = ("none", "")
    binary: str = ""
    steps: int = 0
    tensors: int = 0


def addmm_prefix(problem: Problem) -> Fused:
    """Return the prefix that addmm's alpha and beta express: optionally a scale by a number, then a bias or add. The
    added tensor must have A's dtype."""
    epilogue, alpha, used = problem.epilogue, 1.0, 0
    if epilogue and epilogue[0].kind == "scale" and not epilogue[0].takes_tensor:
        alpha, used = epilogue[0].value, 1
    if len(epilogue) > used and _adds(epilogue[used], (problem.a.dtype,)):
        step = epilogue[used]
        return Fused(alpha, step.value, step.axis, steps=used + 1, tensors=1)
    # A scale alone is cheaper as a separate op than through addmm, which needs a tensor of zeros.
    return Fused()


def mkldnn_prefix(problem: Problem) -> Fused:
    """Return the prefix that oneDNN's linear takes as post-ops: optionally a bias, then one activation, residual add or
    multiply."""
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
    is_full = step.axis == "full" and step.value == 1.0 and step.dtype == problem.a.dtype
    if is_full and step.kind in ("add", "mul"):
        return Fused(**common, binary=step.kind, steps=used + 1, tensors=used + 1)
    return Fused(**common, steps=used, tensors=used)


def _adds(step: Step, dtypes: tuple[str, ...]) -> bool:
    return step.kind in ("bias", "add") and step.takes_tensor and step.dtype in dtypes


def remaining_epilogue(problem: Problem, product_dtype: str, fused: Fused) -> tuple[Epilogue | None, str]:
    """Return the steps that remain after an op has computed ``fused`` into an output of ``product_dtype``, or None and
    the reason why they cannot follow.

    Rounding to a narrow dtype before further steps (or before a wider output) is an error that the bound does not
    allow. Exceptions: the next step is a cast to exactly that dtype, or only relu follows (rounding keeps signs).
    """
    remaining = problem.epilogue[fused.steps :]
    if product_dtype in WIDE:
        return remaining, ""
    if remaining and remaining[0].kind == "cast" and remaining[0].dtype == product_dtype:
        return remaining[1:], ""
    if problem.out_dtype == product_dtype and all(step.kind == "relu" for step in remaining):
        return remaining, ""
    then = f"the epilogue step {remaining[0].key}" if remaining else f"{problem.out_dtype} output"
    return None, f"rounds to {product_dtype} before {then}"
