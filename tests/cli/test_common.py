import json
import math

import pytest
import torch
import typer

from gemmtune.cli import common
from gemmtune.core.errors import StoreError


@pytest.mark.parametrize("text", ["16,4096,11008", "16x4096x11008", " 16, 4096 ,11008"])
def test_parse_shape_accepts_commas_and_x(text: str) -> None:
    assert common.parse_shape(text) == (16, 4096, 11008)


@pytest.mark.parametrize("text", ["16,4096", "a,b,c", "", "1,2,3,4", "1,-2,3", "1.5,2,3", f"{1 << 31},1,1"])
def test_malformed_shapes_raise_bad_parameter(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        common.parse_shape(text)


def test_parse_backends_always_includes_aten() -> None:
    assert common.parse_backends("native")[0] == "aten"
    assert common.parse_backends(None)[0] == "aten"
    for text in ("nope", "", ","):
        with pytest.raises(typer.BadParameter, match="known backends: aten"):
            common.parse_backends(text)


def test_two_or_no_sources_of_problems_raise_bad_parameter() -> None:
    for sources in ((None, [], None), ("f.py:g", ["1,2,3"], None), (None, ["1,2,3"], "odd")):
        with pytest.raises(typer.BadParameter, match="give one of"):
            common.requested_problems(*sources, None)


def test_empty_problems_are_omitted() -> None:
    assert common.requested_problems(None, ["0,8,8", "1,8,8"], None, "fp32")[0][0].m == 1
    assert all(problem.flops for problem, _ in common.requested_problems(None, [], "odd", "bf16"))


def test_print_json_writes_infinities_and_nan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": math.inf, "b": [math.nan, 1.5], "c": (1,)})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.5], "c": [1]}


def test_gemmtune_errors_exit_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @common.exit_on_error
    def command(*, as_json: bool) -> None:
        raise StoreError("disk on fire")

    with pytest.raises(typer.Exit) as plain:
        command(as_json=False)
    assert plain.value.exit_code == 1
    assert capsys.readouterr().err == "error: disk on fire\n"
    with pytest.raises(typer.Exit):
        command(as_json=True)
    assert json.loads(capsys.readouterr().out) == {"error": "disk on fire"}


def test_other_exceptions_propagate() -> None:
    @common.exit_on_error
    def command() -> None:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError):
        command()


def test_parse_device_and_parse_latency() -> None:
    assert [common.parse_device(text) for text in (None, "cpu", "cuda", "cuda:1", "cuda:01")] == [
        "cpu", "cpu", "cuda", "cuda:1", "cuda:1"
    ]  # fmt: skip
    for invalid in ("gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1", "mps"):
        with pytest.raises(typer.BadParameter, match="cpu, cuda or cuda:N"):
            common.parse_device(invalid)
    assert common.parse_latency("eager") == "eager"
    with pytest.raises(typer.BadParameter, match="graph or eager"):
        common.parse_latency("fast")
    assert "native" in common.parse_backends(None)
    assert "native" not in common.parse_backends(None, "cuda:1")


def test_problems_of_a_model_are_grouped_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.cli.models import Recorded
    from gemmtune.core.workloads import build
    from gemmtune.ops.record import Recording

    recording = Recording()
    recording.add(build(1, 8, 8, "fp32"))
    recording.add(build(2, 8, 8, "fp32"), 1, torch.device("cuda", 1))
    recording.add(build(3, 8, 8, "fp32"), 1, torch.device("meta"))
    monkeypatch.setattr("gemmtune.cli.models.record_calls", lambda spec, dtype: Recorded(recording, ()))
    groups = common.problems_by_device("m.py:f", [], None, None)
    assert [(device, [problem.m for problem, _ in problems]) for device, problems, _ in groups] == [
        ("cpu", [1]),
        ("cuda:1", [2]),
    ]
    ((device, all_problems, _),) = common.problems_by_device("m.py:f", [], None, None, device="cuda")
    assert (device, len(all_problems)) == ("cuda", 3)
    assert [group.device for group in common.problems_by_device(None, ["1,8,8"], None, None)] == ["cpu"]
