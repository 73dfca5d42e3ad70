"""The surroundings of raced kernels' calls, which ``surroundings.compare`` times."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import OVERLAP as OVERLAP_SETTING
from ..core.decision import BACK_TO_BACK
from ..verify.inputs import Inputs
from .surroundings import OVERLAP, Surrounding

_BACK_TO_BACK_S = 1.5e-3  # seconds of one timing of calls back to back
_SIGN = 0x80  # the sign bit of an 8-bit float


class CallSite(NamedTuple):
    """How one kernel is called.

    operands(i): (inputs, B as the kernel takes it, output) of call i. call(a, b, aux, out): the kernel, where aux is
    the epilogue's tensors; None where no kernel is called.
    """

    operands: Callable[[int], tuple[Inputs, Any, Tensor]]
    call: Callable[..., None] | None


def cpu_surroundings(site: Callable[[str | None], CallSite], outputs: Sequence[Tensor]) -> list[Surrounding]:
    """Return the surroundings of products on a CPU.

    site(id): the CallSite of a candidate, or of no kernel for None. outputs: every output that the call sites use.
    """
    return [_surrounding("between elementwise ops", site, before=True, outputs=outputs)]


def gpu_surroundings(
    site: Callable[[str | None], CallSite],
    outputs: Sequence[Tensor],
    pause: Callable[[], None],
    can_overlap: Callable[[str], bool],
) -> list[Surrounding]:
    """Return the surroundings of products in CUDA graphs.

    site, outputs: as for a CPU. pause: keeps the current stream busy for a moment. can_overlap(id): whether a candidate
    can begin before the preceding kernel ends.
    """

    def back_to_back(name: str, variant: str) -> Callable[[int], None]:
        return _captured_with(OVERLAP_SETTING, "1" if variant == OVERLAP else "0", site(name))

    return [
        _surrounding("behind an elementwise kernel", site, before=True),
        _surrounding("before an elementwise kernel", site, outputs=outputs),
        _surrounding("alone, after a pause", site, pause=pause),
        Surrounding(
            BACK_TO_BACK, back_to_back, lambda name: ("", OVERLAP) if can_overlap(name) else ("",),
            timing_s=_BACK_TO_BACK_S,
        ),
    ]  # fmt: skip


def _surrounding(
    name: str,
    site: Callable[[str | None], CallSite],
    *,
    before: bool = False,
    outputs: Sequence[Tensor] = (),
    pause: Callable[[], None] | None = None,
) -> Surrounding:
    """Return a surrounding that pauses or writes the activations (``before``) ahead of each call, and reads the call's
    output when ``outputs`` are given."""
    results = {id(out): torch.empty_like(out) for out in outputs}

    def around(called: str | None) -> Callable[[int], None]:
        operands, call = site(called)

        def run(i: int) -> None:
            inputs, b, out = operands(i)
            if pause is not None:
                pause()
            if before:
                change_signs(inputs.a)
            if call is not None:
                call(inputs.a, b, inputs.aux, out)
            if results:
                results[id(out)].copy_(out)

        return run

    return Surrounding(name, lambda called, _: around(called), idle=around(None))


def _captured_with(setting: str, value: str, site: CallSite) -> Callable[[int], None]:
    """Return a function that calls a site with an environment variable set, which launches read when they are
    captured."""
    operands, call = site
    assert call is not None

    def run(i: int) -> None:
        inputs, b, out = operands(i)
        former = os.environ.get(setting)
        os.environ[setting] = value
        try:
            call(inputs.a, b, inputs.aux, out)
        finally:
            if former is None:
                del os.environ[setting]
            else:
                os.environ[setting] = former

    return run


def change_signs(activations: Tensor) -> None:
    """Change the sign of every element in place (uint8: flip its bits).

    The activations are written anew, as a norm ahead of a product writes them, and keep their range.
    """
    if activations.dtype == torch.uint8:
        activations.bitwise_not_()
    elif activations.dtype.is_floating_point and activations.dtype.itemsize == 1:
        activations.view(torch.uint8).bitwise_xor_(_SIGN)
    else:
        activations.neg_()
