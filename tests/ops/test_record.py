"""record(): the problems that it counts, and unchanged results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import gemmtune
from gemmtune.core.errors import GemmtuneError
from gemmtune.core.workloads import bmm_problem, int_problem, linear_problem, weight_only_problem
from gemmtune.ops.record import Recording, has_subclass, module_problem
from gemmtune.ops.weight_only import WeightOnly


class Int8Linear(nn.Module):
    """Weight-only linear as in gpt-fast."""

    weight: Tensor
    scales: Tensor

    def __init__(self, k: int, n: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (n, k), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(n).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


def test_products_of_torch_functions_are_recorded() -> None:
    layer = nn.Linear(8, 6)
    x, matrix = torch.randn(2, 3, 8), torch.randn(8, 6)
    heads = torch.randn(2, 4, 3, 5)
    with torch.no_grad(), gemmtune.record() as recording:
        layer(x)
        layer(x[0])
        layer(x[1])
        x @ matrix
        torch.mm(x[0], layer.weight.t())
        heads @ heads.mT
        torch.bmm(heads[0], heads[1].mT)
        torch._int_mm(torch.ones(2, 8, dtype=torch.int8), torch.ones(4, 8, dtype=torch.int8).t())
        torch.arange(4).view(2, 2) @ torch.arange(4).view(2, 2)
        torch.randn(3) @ torch.randn(3)
        layer(x[:0])
    counts = {problem.key: count for problem, count in recording.problems}
    mm_key = "mm|m6.n6.k8|float32:r|float32:r|float32:r|float32"
    scores = bmm_problem(8, 3, 3, 5, "float32").key.replace(
        "float32:r|float32:r|float32:r", "float32:r|float32:c|float32:r"
    )
    assert counts == {
        linear_problem(6, 6, 8, "float32", bias=True).key: 1,
        linear_problem(3, 6, 8, "float32", bias=True).key: 2,
        mm_key: 1,
        linear_problem(3, 6, 8, "float32").key: 1,
        scores: 1,
        scores.replace("b8.", "b4."): 1,
        int_problem(2, 4, 8, constant=False).key: 1,
    }


def test_weight_only_module_is_recorded_as_one_problem() -> None:
    model = nn.Sequential(Int8Linear(16, 8), Int8Linear(8, 8))
    with gemmtune.record() as recording:
        model(torch.randn(3, 16).bfloat16())
    assert [(problem.key, count) for problem, count in recording.problems] == [
        (weight_only_problem(3, 8, 16).key, 1), (weight_only_problem(3, 8, 8).key, 1)
    ]  # fmt: skip


def test_gemmtune_ops_are_counted_once() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    packed = gemmtune.pack(w, layout="aten:row")
    gemmtune.linear(x, w)
    with gemmtune.record() as recording:
        for _ in range(3):
            gemmtune.linear(x, w)
        gemmtune.linear(x, packed)
        gemmtune.mm(x, w.t(), epilogue=[gemmtune.fuse.relu()])
    counts = {problem.key: count for problem, count in recording.problems}
    assert counts == {
        linear_problem(3, 5, 4, "float32", constant=False).key: 3,
        linear_problem(3, 5, 4, "float32").key: 1,
        linear_problem(3, 5, 4, "float32", constant=False).key + "|relu": 1,
    }
    assert len(recording) == 3


def test_recording_ends_with_the_block_after_an_error() -> None:
    model = nn.Sequential(Int8Linear(16, 8))
    with pytest.raises(RuntimeError), gemmtune.record() as recording:
        model(torch.randn(3, 17).bfloat16())
    assert len(recording) == 0
    model(torch.randn(3, 16).bfloat16())
    gemmtune.linear(torch.randn(3, 4), torch.randn(5, 4))
    assert len(recording) == 0
    with gemmtune.record() as second_recording:
        model(torch.randn(3, 16).bfloat16())
    assert len(second_recording) == 1


def test_nested_recordings_raise_gemmtune_error() -> None:
    with gemmtune.record(), pytest.raises(GemmtuneError, match="already active"), gemmtune.record():
        pass


def test_recording_does_not_change_results() -> None:
    layer, x = nn.Linear(8, 6), torch.randn(3, 8)
    expected = layer(x)
    with gemmtune.record():
        result = layer(x)
    assert torch.equal(result, expected)
    assert result.requires_grad


def test_operands_passed_by_keyword_are_recorded() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    with gemmtune.record() as recording:
        F.linear(input=x, weight=w)
        torch.mm(input=x, mat2=w.t())
        torch.addmm(input=torch.zeros(5), mat1=x, mat2=w.t())
        torch.bmm(input=x[None], mat2=w.t()[None])
        torch.matmul(input=x, other=w.t())
    assert sum(count for _, count in recording.problems) == 5


def test_recording_has_the_device_of_each_problem() -> None:
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    y, v = x.to("meta"), w.to("meta")
    layer = Int8Linear(8, 5, torch.float32).to("meta")
    with gemmtune.record() as recording:
        x @ w
        torch.mm(input=y, mat2=v)
        y @ v
        gemmtune.mm(y[:2], v)
        layer(y[:1])
    assert recording.devices == (torch.device("cpu"), torch.device("meta"))
    assert [(problem.m, count) for problem, count in recording.on("cpu")] == [(3, 1)]
    assert [(problem.m, count) for problem, count in recording.on(y.device)] == [(3, 2), (2, 1), (1, 1)]
    assert recording.on("cuda") == []
    assert [(problem.m, count) for problem, count in recording.problems] == [(3, 3), (2, 1), (1, 1)]
    assert repr(recording) == "<Recording: 3 problems, 5 calls>"


def test_problems_are_counted_under_the_place_where_they_run() -> None:
    layer, x = nn.Linear(8, 6), torch.randn(3, 8)
    with torch.no_grad(), gemmtune.record() as recording:
        layer(x)
        recording.where = (1, "head")
        layer(x)
        layer(x)
        x.to("meta") @ torch.ones(8, 2, device="meta")
    problem = linear_problem(3, 6, 8, "float32", bias=True)
    assert recording.problems[0] == (problem, 3)
    assert recording.places(torch.device("cpu")) == [((0, ""), problem, 1), ((1, "head"), problem, 2)]
    assert [(where, item.n) for where, item, _ in recording.places(torch.device("meta"))] == [((1, "head"), 2)]
    assert [(where, item.n, count) for where, item, count in recording.places()] == [
        ((0, ""), 6, 1), ((1, "head"), 6, 2), ((1, "head"), 2, 1)
    ]  # fmt: skip


def test_empty_problems_are_not_counted() -> None:
    recording = Recording()
    for sizes in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        recording.add(linear_problem(*sizes, "float32"))
    recording.add(bmm_problem(0, 2, 3, 4, "float32"))
    assert (len(recording), recording.problems, recording.devices) == (0, [], ())
    recording.add(linear_problem(1, 1, 1, "float32"), count=2)
    assert recording.problems == [(linear_problem(1, 1, 1, "float32"), 2)]


class Marked(Tensor):
    """A tensor subclass without any behaviour of its own."""


def test_only_subclasses_with_values_keep_a_call_from_being_recorded() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    with gemmtune.record() as recording:
        F.linear(x.as_subclass(Marked), w)
        F.linear(x, weight=w.as_subclass(Marked))
        F.linear(x, w, bias=torch.randn(5).as_subclass(Marked))
    assert recording.problems == []
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert has_subclass((fake, 1.0)) is False
    assert has_subclass((x, None, w.as_subclass(Marked))) is True
    assert has_subclass((x, nn.Parameter(w), "x")) is False


def test_operand_by_keyword_beside_one_by_position_is_recorded() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    with gemmtune.record() as recording:
        F.linear(x, weight=w)
    assert recording.problems == [(linear_problem(3, 5, 8, "float32", constant=False), 1)]


class Outer(Int8Linear):
    """A weight-only module whose forward runs other modules and products."""

    def __init__(self) -> None:
        super().__init__(16, 8)
        self.inner, self.plain = Int8Linear(16, 8), nn.Linear(16, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        between = self.inner(x) + F.linear(x, self.plain.weight)
        return between + self.plain(x) + F.linear(x, self.plain.weight)


def test_nothing_inside_a_weight_only_module_is_recorded() -> None:
    model, x = Outer(), torch.randn(3, 16).bfloat16()
    with torch.no_grad(), gemmtune.record() as recording:
        model(x)
        model(x=x)
        model(x.as_subclass(Marked))
        model.plain(x)
        model(x)
    assert recording.problems == [
        (weight_only_problem(3, 8, 16), 2),
        (linear_problem(3, 8, 16, "bfloat16", bias=True), 1),
    ]


class WithoutInput(nn.Module):
    """A weight-only module whose first argument is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(8, 16, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(8))

    def forward(self, rows: int) -> Tensor:
        return torch.ones(rows, 16) @ torch.ones(16, 8)


def test_weight_only_module_without_activations_is_not_recorded() -> None:
    with gemmtune.record() as recording:
        assert WithoutInput()(3).shape == (3, 8)
    assert recording.problems == []


def test_problem_of_a_weight_only_module_has_its_format_and_bias() -> None:
    weight, scale = torch.ones(8, 16, dtype=torch.uint8), torch.ones(4, 8).bfloat16()
    x = torch.ones(2, 3, 32).bfloat16()
    plain = module_problem(x, WeightOnly(weight, scale, scale, 4, 8))
    assert plain == weight_only_problem(6, 8, 32, bits=4, group=8, zero_point=True)
    biased = module_problem(x, WeightOnly(weight, scale, None, 4, 8, torch.ones(8)))
    assert biased.b == weight_only_problem(6, 8, 32, bits=4, group=8).b
    assert [(step.kind, step.axis) for step in biased.epilogue] == [("bias", "col")]


def test_recording_can_begin_again_after_the_block() -> None:
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    recorder = gemmtune.record()
    for count in (1, 2):
        with recorder as recording:
            x @ w
        assert [n for _, n in recording.problems] == [count]
