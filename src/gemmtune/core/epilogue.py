"""Epilogues: the operations on the accumulator before it is stored in the output.

An Epilogue is a tuple of Steps that are applied to the accumulator in order. The accumulator is float32; for integer
products it is int32 and becomes float32 at the first step that needs it. Steps are plain data. Their tensors are passed
separately, in the order of the steps that take one (``Step.takes_tensor``).

A norm of A's rows in front of the product is the first Step (``norm_of``); a layer norm's bias is the second. They are
listed here, and not beside the operand, because their tensors are passed with those of the other Steps, and because
kernels may apply a row's factor to the accumulator.

Integers stay exact through relu, clamp to integer bounds, bias, add and mul of integer tensors (times an integer
``value``), and casts to integer dtypes: intermediate results may exceed int32, and the output saturates. A conversion
to an integer dtype rounds to nearest even and saturates; NaN becomes 0, as in ATen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "scale", "bias", "add", "mul", "relu", "gelu", "gelu_tanh", "silu", "clamp", "cast", "rms_norm", "layer_norm",
    "norm_bias", "swiglu", "geglu", "geglu_tanh",
]  # fmt: skip
Axis = Literal["tensor", "row", "col", "full", "inner"]

NORMS: tuple[Kind, ...] = ("rms_norm", "layer_norm")
_WITH_TENSOR = ("scale", "bias", "add", "mul", "norm_bias", *NORMS)
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
GATES: dict[Kind, Kind] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}  # the activation of the gate


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an epilogue on the accumulator ``acc`` [M, N] (batched: [batch, M, N]).

    kind:
      - ``scale``: ``acc *= value * t`` with a floating-point ``t``, whose shape ``axis`` names. With
        ``axis="tensor"`` and ``dtype=None`` there is no tensor: ``acc *= value``.
      - ``bias``, ``add``: ``acc += value * t`` (``bias`` is ``axis="col"``, ``add`` any axis).
      - ``mul``: ``acc *= t``.
      - ``relu``, ``gelu`` (erf), ``gelu_tanh``, ``silu``: elementwise.
      - ``clamp``: to ``[lo, hi]``.
      - ``cast``: round to ``dtype`` and back to the accumulator's type (integers saturate; ties to even).
      - ``rms_norm``: the first step only, with ``axis="inner"``: the product is that of the normalised rows of A,
        ``a[m, k] * t[k] / sqrt(mean over k of a[m, k]**2 + value)`` (``torch.nn.functional.rms_norm``; Zhang and
        Sennrich 2019, "Root mean square layer normalization").
      - ``layer_norm``: the same for ``(a[m, k] - mean) * t[k] / sqrt(variance + value)``, where mean and variance
        (divided by K) are those of row m (``torch.nn.functional.layer_norm``; Ba, Kiros and Hinton 2016, "Layer
        normalization").
      - ``norm_bias``: behind ``layer_norm`` only, with ``axis="inner"``: ``+ t[k]`` for each normalised element.
      - ``swiglu``, ``geglu``, ``geglu_tanh``: the last step only: the left half of the columns (the gate), through
        silu, gelu or gelu_tanh, times the right half. The output has N / 2 columns (Shazeer 2020, "GLU variants improve
        transformer").
    axis: shape of the tensor: ``tensor`` = one element, ``row`` = [M], ``col`` = [N], ``full`` = [M, N], ``inner`` =
    [K].
    dtype: the tensor's dtype (torch's name, e.g. ``"bfloat16"``), or the target of ``cast``.
    """

    kind: Kind
    axis: Axis = "full"
    dtype: str | None = None
    value: float = 1.0
    lo: float = float("-inf")
    hi: float = float("inf")

    @property
    def takes_tensor(self) -> bool:
        return self.kind in _WITH_TENSOR and self.dtype is not None

    @property
    def key(self) -> str:
        """The canonical text, e.g. ``add.col.bfloat16*0.5`` or ``clamp(-1.0,1.0)``."""
        if self.kind in _ACTIVATIONS or self.kind in GATES:
            return self.kind
        if self.kind == "clamp":
            return f"clamp({self.lo!r},{self.hi!r})"
        if self.kind == "cast":
            return f"cast.{self.dtype}"
        text = f"{self.kind}.{self.axis}"
        if self.dtype is not None:
            text += f".{self.dtype}"
        return text if self.value == 1.0 else f"{text}*{self.value!r}"


Epilogue = tuple[Step, ...]


def epilogue_key(epilogue: Epilogue) -> str:
    """Return the canonical text of an epilogue; empty for an epilogue without steps."""
    return ";".join(step.key for step in epilogue)


def norm_of(epilogue: Epilogue) -> Step | None:
    """Return the step that normalises A's rows; None for an epilogue without one."""
    return epilogue[0] if epilogue and epilogue[0].kind in NORMS else None


def norm_steps_of(epilogue: Epilogue) -> Epilogue:
    """Return the first steps, which normalise A's rows: the norm and its bias. Each takes a tensor [K]. Empty without a
    norm."""
    if norm_of(epilogue) is None:
        return ()
    return epilogue[: 2 if len(epilogue) > 1 and epilogue[1].kind == "norm_bias" else 1]


def gate_of(epilogue: Epilogue) -> Step | None:
    """Return the step that multiplies one half of the columns by the other; None for an epilogue without one."""
    return epilogue[-1] if epilogue and epilogue[-1].kind in GATES else None


def tensor_count(epilogue: Epilogue) -> int:
    """Return the number of tensors that the epilogue takes."""
    return sum(step.takes_tensor for step in epilogue)
