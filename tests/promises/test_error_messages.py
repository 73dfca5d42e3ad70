"""Tests of error messages, of the dtype that model factories get, and of the times and ratios in tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import typer

import gemmtune
from gemmtune.cli.models import call_factory
from gemmtune.cli.tables import decisions_table
from gemmtune.core.decision import LayoutDecision
from gemmtune.report.rows import best_by_backend, summarize
from helpers.factories import ATEN, make_decision, make_evidence

A, B = torch.ones(4, 8), torch.ones(8, 6)
Q, F8 = torch.ones(8, 6, dtype=torch.int8), torch.ones(16, 16).to(torch.float8_e4m3fn)
ONE = torch.tensor(1.0)
COMPLEX = A.to(torch.complex64)

CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: gemmtune.linear(COMPLEX, B.t()), r"Use torch\.nn\.functional\.linear$"),
    (lambda: gemmtune.linear(A, B.t().to_sparse()), r"Use torch\.nn\.functional\.linear$"),
    (lambda: gemmtune.mm(COMPLEX, B), r"Use torch\.mm$"),
    (lambda: gemmtune.mixed_mm(COMPLEX, Q, torch.ones(6)), r"^mixed_mm\(\): .*Pass a dense tensor of real numbers$"),
    (lambda: gemmtune.int_mm(COMPLEX, Q), r"^int_mm\(\): .*Pass a dense tensor of real numbers$"),
    (lambda: gemmtune.pack(COMPLEX), r"^pack\(\): .*Pass a dense tensor of real numbers$"),
    (lambda: gemmtune.linear(A, B.t(), torch.ones(5)), r"^linear\(\): bias of shape \[5\]"),
    (lambda: gemmtune.linear(A, B.t(), torch.ones(3, 6)), r"^linear\(\): bias of shape \[3, 6\]"),
    (lambda: gemmtune.addmm(torch.ones(5), A, B), r"^addmm\(\): input of shape \[5\]"),
    (lambda: gemmtune.addmm(torch.ones(3, 3), A, B, beta=2), r"^addmm\(\): input of shape \[3, 3\]"),
    (lambda: gemmtune.mm(A[None], B), r"^mm\(\): input must be a matrix"),
    (lambda: gemmtune.mixed_mm(A, Q, torch.ones(6), bias=torch.ones(5)), r"^mixed_mm\(\): bias "),
    (lambda: gemmtune.mixed_mm(A, Q, torch.ones(6), 3), r"^mixed_mm\(\): argument 'zero_point' \(position 4\)"),
    (lambda: gemmtune.scaled_mm(F8, F8.t(), None, None), r"^scaled_mm\(\): argument 'scale_a' \(position 3\) must be"),
    (lambda: gemmtune.scaled_mm(F8, F8.t(), ONE, None), r"^scaled_mm\(\): argument 'scale_b' \(position 4\) must be"),
    (lambda: gemmtune.scaled_mm(F8, F8.t(), ONE, ONE, torch.ones(3)), r"^scaled_mm\(\): bias "),
    (
        lambda: gemmtune.scaled_mm(F8, F8.t(), ONE, ONE, None, torch.ones(3), torch.float8_e4m3fn),
        r"^scaled_mm\(\): scale_result ",
    ),
    (lambda: gemmtune.mm(A, B, epilogue=gemmtune.fuse.relu()), r"^mm\(\): epilogue must be a list"),
    (lambda: gemmtune.linear(A, B.t(), epilogue=gemmtune.fuse.relu()), r"^linear\(\): epilogue must be a list"),
    (lambda: gemmtune.mm(A, B, epilogue=[gemmtune.fuse.add(torch.ones(5))]), r"^fuse\.add\(\): a tensor of shape"),
]


@pytest.mark.parametrize("index", range(len(CALLS)))
def test_errors_name_the_function_and_the_argument(index: int) -> None:
    call, message = CALLS[index]
    with pytest.raises((TypeError, ValueError, gemmtune.GemmtuneError), match=message):
        call()


def test_a_factory_without_a_dtype_name_gets_a_torch_dtype() -> None:
    def unannotated(dtype, layers=1):  # type: ignore[no-untyped-def]
        return print, (dtype,)

    def annotated(dtype: torch.dtype = torch.float32) -> Any:
        return print, (dtype,)

    for factory in (unannotated, annotated):
        for name, dtype in (("bf16", torch.bfloat16), ("fp64", torch.float64), ("fp8", torch.float8_e4m3fn)):
            assert call_factory(factory, name)[1] == [((dtype,), {})]
        with pytest.raises(typer.BadParameter, match="int8wo is none"):
            call_factory(factory, "int8wo")


def test_a_factory_with_a_string_dtype_gets_the_name() -> None:
    def annotated(dtype: str) -> Any:
        return print, (dtype,)

    def with_default(dtype="bf16"):  # type: ignore[no-untyped-def]
        return print, (dtype,)

    for factory in (annotated, with_default):
        assert call_factory(factory, "int8wo")[1] == [(("int8wo",), {})]
        with pytest.raises(typer.BadParameter, match="unknown dtype"):
            call_factory(factory, "bfloat")


def test_the_times_of_a_row_are_the_times_of_its_ratio() -> None:
    """A candidate of ATen that was fast in screening alone is not the baseline of the ratio."""
    original = make_decision(aten_s=94e-6)
    screened = make_evidence(ATEN.make("aten", "matmul"), "screened", 49.2e-6, ratio=0.6)
    winner = original.find(original.chosen)
    assert winner is not None
    layout = LayoutDecision("winner", winner.id, ATEN.id, 0.5, 0.49, 0.51)
    for layouts in ({"": layout}, {}):
        decision = msgspec.structs.replace(original, evidence=(*original.evidence, screened), layouts=layouts)
        row = summarize(decision)
        assert row.aten_s is not None
        assert row.best_s is not None
        assert row.aten_s / row.best_s == pytest.approx(row.speedup, rel=0.05)
        assert best_by_backend(decision)["aten"].id == ATEN.id


def test_the_caption_of_a_decisions_table_defines_the_ratio() -> None:
    assert "median of the ratios" in str(decisions_table([make_decision()]).caption)
