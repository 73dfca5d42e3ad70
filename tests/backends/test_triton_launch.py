"""What the Triton backend hands the driver, without a GPU: a driver that writes down what it is asked to launch."""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import replace

import pytest
import torch

from gemmtune.backends.gpu import kernel as shared
from gemmtune.backends.gpu.artifact import Header, Tma
from gemmtune.backends.gpu.kernel import GpuKernel
from gemmtune.backends.triton.compiler import CONVERTED_ITEMS, make_spec
from gemmtune.backends.triton.kernel import TEMPLATES
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, weight_only_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from helpers.batches import LAYOUTS
from helpers.drivers import Driver, simulated


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return simulated(monkeypatch)


def loaded(fake: Driver, problem: Problem, template: str = "tiled", split: int = 1) -> GpuKernel:
    config = {"bm": 16, "bn": 64, "bk": 128, "split": split, "swap": 0, "group": 8, "stages": 3, "warps": 4}
    candidate = Candidate.make("triton", template, **config)
    passed = tuple(name for name, kind in make_spec(problem, candidate).signature.items() if kind != "constexpr")
    header = Header(template, 0, 0, 4, passed, 1)
    fake.arguments[template] = len(passed)
    return TEMPLATES[template](problem, candidate, [(header, b"")])


def tma(fake: Driver, problem: Problem, template: str, stream: int = 0) -> GpuKernel:
    """A kernel that reads A and B through descriptors."""
    config = {"bm": 64, "bn": 64, "bk": 64, "group": 8, "stages": 3, "warps": 4, "stream": stream}
    described = {"a_desc": Tma(3, 2, 1, (64, 64)), "b_desc": Tma(3, 2, 1, (128, 64))}
    taking = ("t0",) if problem.epilogue else ()
    rest = (*(("s_ptr",) if problem.b.quant else ()), *taking, "M", "N", "K", "ldc")
    first = ("a_desc", "b_desc", "c_ptr", *(("ws_ptr", "lock_ptr") if stream else ()))
    header = Header(template, 0, 0, 4, (*first, *rest, "PROGRAMS"), 2, described)
    before = Header("convert", 0, 0, 4, ("source_ptr", "target_ptr", "COUNT"), 1)
    fake.arguments |= {template: len(header.arguments), "convert": 3}
    parts = [(before, b""), (header, b"")] if template == "converted" else [(header, b"")]
    return TEMPLATES[template](problem, Candidate.make("triton", template, **config), parts)


def launched(fake: Driver, made: GpuKernel) -> tuple[tuple[int, int], dict[str, int]]:
    _, grid, values = fake.launches.pop()
    return grid, dict(zip(made.header.arguments, values, strict=True))


def call(made: GpuKernel, inputs: Inputs) -> torch.Tensor:
    problem = made.problem
    shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (inputs.a.shape[0], problem.n)
    out = torch.empty(shape, dtype=getattr(torch, problem.out_dtype))
    made.run(inputs.a, made.pack(inputs.b) if made.packing else inputs.b, inputs.aux, out)
    return out


def test_a_plain_product(fake: Driver) -> None:
    problem = build(40, 200, 256, "bf16")
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    out = call(made, inputs)
    grid, values = launched(fake, made)
    assert grid == (3 * 4, 1)
    assert values == {
        "a_ptr": inputs.a.data_ptr(), "b_ptr": inputs.b.data_ptr(), "c_ptr": out.data_ptr(), "M": 40, "N": 200,
        "K": 256, "lda": 256, "ldb": 256, "ldc": 200,
    }  # fmt: skip


def test_another_m_is_bound_anew_and_known_again(fake: Driver) -> None:
    made = loaded(fake, build(40, 200, 256, "bf16"))
    for m in (40, 3, 40):
        inputs = make_inputs(made.problem.with_m(m), 0)
        call(made, inputs)
        grid, values = launched(fake, made)
        assert (grid, values["M"], values["a_ptr"]) == ((-(-m // 16) * 4, 1), m, inputs.a.data_ptr())
    bound = [made.bind(make_inputs(made.problem.with_m(m), 0).a, make_inputs(made.problem, 0).b, ()) for m in (3, 3, 4)]
    assert bound[0] is bound[1]
    assert bound[1] is not bound[2]


def test_few_launches_are_kept(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAX_LAUNCHES", 2)
    made = loaded(fake, build(40, 200, 256, "bf16"))
    for m in range(1, 6):
        call(made, make_inputs(made.problem.with_m(m), 0))
    assert len(made._bound) <= 2


def test_batches_go_by_their_strides(fake: Driver) -> None:
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    call(made, inputs)
    grid, values = launched(fake, made)
    assert grid == (2 * 2, 3)
    assert (values["batch_a"], values["batch_b"], values["batch_c"]) == (20 * 128, 72 * 128, 20 * 72)


def test_scales_and_the_epilogues_tensors_follow(fake: Driver) -> None:
    steps = (Step("bias", "col", "bfloat16"), Step("silu"), Step("add", "full", "bfloat16"))
    problem = replace(weight_only_problem(5, 64, 256), epilogue=steps)
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    call(made, inputs)
    _, values = launched(fake, made)
    assert values["s_ptr"] == inputs.b.scale.data_ptr()
    assert (values["t0"], values["t2"]) == tuple(tensor.data_ptr() for tensor in inputs.aux)
    assert values["ld2"] == 64


def test_int4_weights_bring_their_own_tensors(fake: Driver) -> None:
    problem = weight_only_problem(5, 64, 256, bits=4, group=128, zero_point=True)
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    packed = made.pack(inputs.b)
    made.run(inputs.a, packed, (), torch.empty(5, 64, dtype=torch.bfloat16))
    _, values = launched(fake, made)
    assert (values["b_ptr"], values["s_ptr"], values["z_ptr"]) == tuple(tensor.data_ptr() for tensor in packed.data)


def test_descriptors_follow_their_matrices(fake: Driver) -> None:
    """Persistent programs: no more than there are multiprocessors, A and B by descriptors that are kept."""
    problem = replace(build(200, 192, 256, "bf16"), epilogue=(Step("bias", "col", "bfloat16"),))
    made, inputs = tma(fake, problem, "persistent"), make_inputs(problem, 0)
    other = make_inputs(problem, 1)
    for operands in (inputs, other, inputs):
        out = call(made, operands)
        grid, values = launched(fake, made)
        assert grid == (6, 1)
        assert (values["a_desc"], values["b_desc"]) == (operands.a.data_ptr(), operands.b.data_ptr())
        assert (values["c_ptr"], values["t0"]) == (out.data_ptr(), operands.aux[0].data_ptr())
        assert (values["M"], values["N"], values["K"], values["ldc"], values["PROGRAMS"]) == (200, 192, 256, 192, 6)
    assert len(made._weights) == 2  # type: ignore[attr-defined]
    fake.statuses = [1]
    with pytest.raises(KernelError, match="launching persistent: CUDA error 1"):
        call(made, inputs)


def test_a_matrix_by_itself_has_two_descriptors(fake: Driver) -> None:
    """Its boxes as A and as B differ in their rows."""
    problem = build(192, 192, 256, "bf16")
    made, inputs = tma(fake, problem, "persistent"), make_inputs(problem, 0)
    made.run(inputs.a, inputs.a.t(), (), torch.empty(192, 192, dtype=torch.bfloat16))
    names = made.header.arguments
    boxes = [(ctypes.c_uint64 * 7).from_address(fake.places[names.index(name)])[6] for name in ("a_desc", "b_desc")]
    assert boxes == [made.header.descriptors[name].block[0] for name in ("a_desc", "b_desc")]
    assert boxes[0] != boxes[1]


def test_converted_weights_are_read_where_they_were_put(fake: Driver) -> None:
    problem = replace(weight_only_problem(200, 64, 256), epilogue=(Step("bias", "col", "bfloat16"),))
    made, inputs = tma(fake, problem, "converted"), make_inputs(problem, 0)
    call(made, inputs)
    (place,) = fake.temporaries
    assert place.numel() == 64 * 256 * 2 == made.workspace_bytes
    (first, grid, converted), _ = fake.launches
    assert (first, converted) == ("convert", [inputs.b.data.data_ptr(), place.data_ptr(), 64 * 256])
    assert grid == (-(-64 * 256 // CONVERTED_ITEMS), 1)
    _, values = launched(fake, made)
    assert (values["a_desc"], values["b_desc"]) == (inputs.a.data_ptr(), place.data_ptr())
    assert (values["s_ptr"], values["t0"]) == (inputs.b.scale.data_ptr(), inputs.aux[0].data_ptr())


def test_any_view_of_the_same_memory_will_do(fake: Driver) -> None:
    """bind promises it: the ops hand over untransposed weights, and scales in the caller's shapes."""
    problem = fp8_problem(5, 64, 256)
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    launch, out = made.bind(inputs.a, inputs.b, inputs.aux), torch.empty(5, 64, dtype=torch.bfloat16)
    launch(out, inputs.a, inputs.b.t(), *[tensor.reshape(-1, 1) for tensor in inputs.aux])
    _, values = launched(fake, made)
    made.run(inputs.a, inputs.b, inputs.aux, out)
    assert launched(fake, made)[1] == values


def test_split_sums_have_a_place_of_their_own(fake: Driver) -> None:
    made = loaded(fake, build(20, 200, 256, "bf16"), split=2)
    for _ in range(2):
        call(made, make_inputs(made.problem, 0))
    grid, values = launched(fake, made)
    assert grid == (2 * 4 * 2, 1)
    assert [place.numel() for place in fake.temporaries] == [2 * 8 * 16 * 64 * 4] * 2
    assert made.workspace_bytes == 2 * 8 * 16 * 64 * 4
    assert values["ws_ptr"] == fake.temporaries[1].data_ptr()
    (memory,) = fake.memory
    assert values["lock_ptr"] == ctypes.addressof(memory)
    assert not any(memory)
    assert fake.mode == 0


def test_counters_are_a_streams_or_a_graphs(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were captured on one stream may be replayed beside each other, and beside the stream."""
    monkeypatch.setattr(shared, "_SEMAPHORE_POOL_BYTES", 128)
    small = loaded(fake, build(20, 200, 256, "bf16"), split=2)  # 8 counters
    large = loaded(fake, build(40, 200, 256, "bf16"), split=2)  # 12

    def counters(made: GpuKernel) -> int:
        call(made, make_inputs(made.problem, 0))
        return launched(fake, made)[1]["lock_ptr"]

    seen: dict[int, int] = {}
    for capture in (0, 5, 0, 6, 5):
        fake.capture = capture
        seen.setdefault(capture, counters(small))
        assert counters(small) == seen[capture]  # the same each time
        assert fake.mode == 0
    assert len(set(seen.values())) == 3
    more = counters(large)  # of the last capture: more than it has
    assert more not in seen.values()
    assert counters(small) == more
    ranges = sorted((start, start + 4 * count) for start, count in [*[(each, 8) for each in seen.values()], (more, 12)])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert len(fake.memory) == 2
    assert not any(any(memory) for memory in fake.memory)


@pytest.mark.parametrize("m", [200, 3])
def test_programs_that_share_tiles_have_a_place_each(m: int, fake: Driver) -> None:
    """All of them, however few the tiles."""
    made = tma(fake, build(200, 192, 256, "bf16"), "persistent", stream=1)
    call(made, make_inputs(made.problem.with_m(m), 0))
    grid, values = launched(fake, made)
    there = torch.cuda.get_device_properties(0).multi_processor_count
    assert grid == (there, 1)
    assert values["PROGRAMS"] == there
    assert values["lock_ptr"]
    (place,) = fake.temporaries
    assert values["ws_ptr"] == place.data_ptr()
    assert place.numel() == made.workspace_bytes == there * 64 * 64 * 4


def test_what_starts_off_a_boundary_is_copied(fake: Driver) -> None:
    problem = build(40, 200, 256, "bf16")
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    shifted = torch.empty(40 * 256 + 1, dtype=torch.bfloat16)[1:].view(40, 256)
    out = torch.zeros(40 * 200 + 3, dtype=torch.bfloat16)[3:].view(40, 200)
    made.run(shifted, inputs.b, (), out)
    _, values = launched(fake, made)
    assert values["b_ptr"] == inputs.b.data_ptr()
    assert values["a_ptr"] != shifted.data_ptr()
    assert values["c_ptr"] != out.data_ptr()
    assert not (values["a_ptr"] | values["c_ptr"]) % 16


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_are_copied_only_where_they_start_off_a_boundary(fake: Driver, name: str) -> None:
    """Batch strides are taken as they are; copies hold the same values, expanded and overlapping ones too."""
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    made = loaded(fake, problem)
    a, b = LAYOUTS[name](torch.randn(3, 20, 128).bfloat16()), torch.randn(3, 128, 72).bfloat16()
    seen: list[torch.Tensor] = []

    def read(grid: tuple[int, int], slots: list[int]) -> None:
        values = dict(zip(made.header.arguments, slots, strict=True))
        count = 2 * values["batch_a"] + 20 * 128
        memory = (ctypes.c_char * (2 * count)).from_address(values["a_ptr"])
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        seen.append(flat.as_strided(a.shape, (values["batch_a"], 128, 1)).clone())
        assert (values["a_ptr"] == a.data_ptr()) == (a.data_ptr() % 16 == 0)
        assert values["a_ptr"] % 16 == 0
        assert values["b_ptr"] == b.data_ptr()

    fake.run = read
    for _ in range(2):
        made.run(a, b, (), torch.empty(3, 20, 72, dtype=torch.bfloat16))
        assert torch.equal(seen[-1], a)


def test_a_copy_does_not_change_how_dense_batches_are_read(fake: Driver) -> None:
    """The launch that copies of odd operands share with dense ones copies dense ones by their own strides."""
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    made, b = loaded(fake, problem), torch.randn(3, 128, 72).bfloat16()
    odd = LAYOUTS["odd start and batch stride"](torch.randn(3, 20, 128).bfloat16())
    dense = LAYOUTS["odd start"](torch.randn(3, 20, 128).bfloat16())
    for a in (odd, dense):
        read: list[torch.Tensor] = []

        def note(grid: tuple[int, int], slots: list[int], read: list[torch.Tensor] = read) -> None:
            memory = (ctypes.c_char * (2 * 3 * 20 * 128)).from_address(slots[0])
            read.append(torch.frombuffer(memory, dtype=torch.bfloat16).view(3, 20, 128).clone())

        fake.run = note
        made.run(a, b, (), torch.empty(3, 20, 72, dtype=torch.bfloat16))
        assert torch.equal(read[-1], a)


def test_threads_write_into_blocks_of_their_own(fake: Driver) -> None:
    problem = build(40, 200, 256, "bf16")
    made, inputs = loaded(fake, problem), make_inputs(problem, 0)
    call(made, inputs)
    other = threading.Thread(target=call, args=(made, inputs))
    other.start()
    other.join()
    call(made, inputs)
    assert fake.starts[0] == fake.starts[2] != fake.starts[1]


def test_a_refusal_is_an_error_and_a_thread_without_a_context_gets_one(fake: Driver) -> None:
    made = loaded(fake, build(40, 200, 256, "bf16"))
    inputs = make_inputs(made.problem, 0)
    fake.statuses = [201]
    call(made, inputs)
    assert len(fake.launches) == 1
    fake.statuses = [1]
    with pytest.raises(KernelError, match="launching tiled: CUDA error 1"):
        call(made, inputs)
