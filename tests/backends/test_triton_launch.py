"""Launches of the Triton backend's kernels through a fake driver that records grids and arguments."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune.backends.gpu import any_batch, driver
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
from helpers.drivers import FakeDriver, install_fake_driver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install_fake_driver(monkeypatch)


def load_kernel(fake: FakeDriver, problem: Problem, template: str = "tiled", split: int = 1) -> GpuKernel:
    config = {"bm": 16, "bn": 64, "bk": 128, "split": split, "swap": 0, "group": 8, "stages": 3, "warps": 4}
    candidate = Candidate.make("triton", template, **config)
    arguments = tuple(name for name, kind in make_spec(problem, candidate).signature.items() if kind != "constexpr")
    header = Header(template, 0, 0, 4, arguments, 1)
    fake.arguments[template] = len(arguments)
    return TEMPLATES[template](problem, candidate, [(header, b"")])


def load_tma_kernel(fake: FakeDriver, problem: Problem, template: str, stream: int = 0) -> GpuKernel:
    """Return a kernel that reads A and B through tensor maps."""
    config = {"bm": 64, "bn": 64, "bk": 64, "group": 8, "stages": 3, "warps": 4, "stream": stream}
    tensor_maps = {"a_desc": Tma(3, 2, 1, (64, 64)), "b_desc": Tma(3, 2, 1, (128, 64))}
    epilogue_arguments = ("t0",) if problem.epilogue else ()
    other_arguments = (*(("s_ptr",) if problem.b.quant else ()), *epilogue_arguments, "M", "N", "K", "ldc")
    leading_arguments = ("a_desc", "b_desc", "c_ptr", *(("ws_ptr", "lock_ptr") if stream else ()))
    header = Header(template, 0, 0, 4, (*leading_arguments, *other_arguments, "PROGRAMS"), 2, tensor_maps)
    convert_header = Header("convert", 0, 0, 4, ("source_ptr", "target_ptr", "COUNT"), 1)
    fake.arguments |= {template: len(header.arguments), "convert": 3}
    parts = [(convert_header, b""), (header, b"")] if template == "converted" else [(header, b"")]
    return TEMPLATES[template](problem, Candidate.make("triton", template, **config), parts)


def pop_launch(fake: FakeDriver, kernel: GpuKernel) -> tuple[tuple[int, int], dict[str, int]]:
    _, grid, values = fake.launches.pop()
    return grid, dict(zip(kernel.header.arguments, values, strict=True))


def run_kernel(kernel: GpuKernel, inputs: Inputs) -> torch.Tensor:
    problem = kernel.problem
    out = torch.empty(*inputs.a.shape[:-1], problem.n, dtype=getattr(torch, problem.out_dtype))
    kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)
    return out


def test_launch_passes_grid_pointers_sizes_and_strides(fake: FakeDriver) -> None:
    problem = build(40, 200, 256, "bf16")
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    out = run_kernel(kernel, inputs)
    grid, values = pop_launch(fake, kernel)
    assert grid == (3 * 4, 1)
    assert values == {
        "a_ptr": inputs.a.data_ptr(), "b_ptr": inputs.b.data_ptr(), "c_ptr": out.data_ptr(), "M": 40, "N": 200,
        "K": 256, "lda": 256, "ldb": 256, "ldc": 200,
    }  # fmt: skip


def test_a_launch_serves_any_m(fake: FakeDriver) -> None:
    kernel = load_kernel(fake, build(40, 200, 256, "bf16"))
    for m in (40, 3, 40):
        inputs = make_inputs(kernel.problem.with_m(m), 0)
        run_kernel(kernel, inputs)
        grid, values = pop_launch(fake, kernel)
        assert (grid, values["M"], values["a_ptr"]) == ((-(-m // 16) * 4, 1), m, inputs.a.data_ptr())
    first, other = [
        kernel.bind(make_inputs(kernel.problem.with_m(m), 0).a, make_inputs(kernel.problem, 0).b, ()) for m in (3, 4)
    ]
    assert first is other


def test_what_kernels_remember_of_sizes_is_bounded(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of batches, the values of M, and the tensor maps."""
    for module, name in ((shared, "_MAX_LAUNCHES"), (shared, "_MAX_SIZES"), (driver, "MAX_TENSOR_MAPS")):
        monkeypatch.setattr(module, name, 2)
    values: list[dict[int, object]] = []
    make_launch = GpuKernel._make_launch

    def note_values(kernel: GpuKernel, *args: Any) -> Any:
        launch = make_launch(kernel, *args)
        values.append(inspect.getclosurevars(launch).nonlocals["known_values"].__self__)
        return launch

    monkeypatch.setattr(GpuKernel, "_make_launch", note_values)
    loaders = (
        lambda: load_kernel(fake, build(40, 200, 256, "bf16")),
        lambda: load_kernel(fake, bmm_problem(2, 40, 200, 256, "bfloat16")),
        lambda: load_tma_kernel(fake, build(200, 192, 256, "bf16"), "persistent"),
    )
    for load in loaders:
        kernel = load()
        for m in range(1, 6):
            run_kernel(kernel, make_inputs(kernel.problem.with_m(m), 0))
            assert pop_launch(fake, kernel)[1]["M"] == m
        assert 1 <= len(kernel._bound) <= 2
        assert all(len(maps) <= 2 for maps in getattr(kernel, "_maps", {}).values())
    assert len(values) == 1 + 5 + 1  # one launch for all M, or one for each M of a batched product
    assert all(1 <= len(known) <= 2 for known in values)


def test_descriptors_are_apart_and_outlive_the_cache(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are allocated together, and than the cache keeps."""
    monkeypatch.setattr(driver, "MAX_TENSOR_MAPS", 50)
    maps = driver.TensorMaps(Tma(3, 2, 9, (64, 32)), 256, 264, clips_boxes=True)
    made = [maps[rows, 4096 * rows] for rows in range(1, 101)]
    assert len(maps) <= 50
    assert maps[100, 409600] is made[-1]
    assert all(each.address % 128 == 0 for each in made)
    assert len({each.address for each in made}) == 100
    for rows, each in enumerate(made, 1):
        fields = list((ctypes.c_uint64 * 7).from_address(each.address))
        assert fields == [4096 * rows, 512, 256, rows, 528, 32, min(64, rows)]


def test_launch_passes_batch_strides(fake: FakeDriver) -> None:
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    run_kernel(kernel, inputs)
    grid, values = pop_launch(fake, kernel)
    assert grid == (2 * 2, 3)
    assert (values["batch_a"], values["batch_b"], values["batch_c"]) == (20 * 128, 72 * 128, 20 * 72)


def test_kernel_serves_other_batches(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With launches of their own, of which a kernel keeps those of a few batches."""
    monkeypatch.setattr(any_batch, "_MAX_BATCHES", 2)
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    kernel = load_kernel(fake, problem)
    for batch in (5, 3, 1, 7, 5):
        a, b = torch.randn(batch, 20, 128).bfloat16(), torch.randn(batch, 128, 72).bfloat16()
        out = torch.empty(batch, 20, 72, dtype=torch.bfloat16)
        for _ in range(2):
            kernel.run(a, b, (), out)
            grid, values = pop_launch(fake, kernel)
            assert grid == (2 * 2, batch)
            assert (values["a_ptr"], values["c_ptr"]) == (a.data_ptr(), out.data_ptr())
    assert kernel.problem == problem
    assert set(kernel._of_batches) == {7, 5}


def test_launch_passes_scales_and_epilogue_tensors(fake: FakeDriver) -> None:
    steps = (Step("bias", "col", "bfloat16"), Step("silu"), Step("add", "full", "bfloat16"))
    problem = replace(weight_only_problem(5, 64, 256), epilogue=steps)
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    run_kernel(kernel, inputs)
    _, values = pop_launch(fake, kernel)
    assert values["s_ptr"] == inputs.b.scale.data_ptr()
    assert (values["t0"], values["t2"]) == tuple(tensor.data_ptr() for tensor in inputs.aux)
    assert values["ld2"] == 64


def test_launch_passes_the_tensors_of_a_packed_int4_weight(fake: FakeDriver) -> None:
    problem = weight_only_problem(5, 64, 256, bits=4, group=128, zero_point=True)
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    packed = kernel.pack(inputs.b)
    kernel.run(inputs.a, packed, (), torch.empty(5, 64, dtype=torch.bfloat16))
    _, values = pop_launch(fake, kernel)
    assert (values["b_ptr"], values["s_ptr"], values["z_ptr"]) == tuple(tensor.data_ptr() for tensor in packed.data)


def test_tensor_maps_are_cached_per_matrix(fake: FakeDriver) -> None:
    """A persistent grid has at most one program per multiprocessor; tensor maps of A and B are cached."""
    problem = replace(build(200, 192, 256, "bf16"), epilogue=(Step("bias", "col", "bfloat16"),))
    kernel, inputs = load_tma_kernel(fake, problem, "persistent"), make_inputs(problem, 0)
    other = make_inputs(problem, 1)
    for operands in (inputs, other, inputs):
        out = run_kernel(kernel, operands)
        grid, values = pop_launch(fake, kernel)
        assert grid == (6, 1)
        assert (values["a_desc"], values["b_desc"]) == (operands.a.data_ptr(), operands.b.data_ptr())
        assert (values["c_ptr"], values["t0"]) == (out.data_ptr(), operands.aux[0].data_ptr())
        assert (values["M"], values["N"], values["K"], values["ldc"], values["PROGRAMS"]) == (200, 192, 256, 192, 6)
    assert [len(maps) for maps in kernel._maps.values()] == [2, 2]  # type: ignore[attr-defined]
    fake.statuses = [1]
    with pytest.raises(KernelError, match="launching persistent: CUDA error 1"):
        run_kernel(kernel, inputs)


def test_matrix_times_its_transpose_has_two_tensor_maps(fake: FakeDriver) -> None:
    """The matrix's boxes as A and as B have different numbers of rows."""
    problem = build(192, 192, 256, "bf16")
    kernel, inputs = load_tma_kernel(fake, problem, "persistent"), make_inputs(problem, 0)
    kernel.run(inputs.a, inputs.a.t(), (), torch.empty(192, 192, dtype=torch.bfloat16))
    names = kernel.header.arguments
    boxes = [
        (ctypes.c_uint64 * 7).from_address(fake.argument_addresses[names.index(name)])[6]
        for name in ("a_desc", "b_desc")
    ]
    assert boxes == [kernel.header.descriptors[name].block[0] for name in ("a_desc", "b_desc")]
    assert boxes[0] != boxes[1]


def test_converted_weight_is_read_from_the_workspace(fake: FakeDriver) -> None:
    problem = replace(weight_only_problem(200, 64, 256), epilogue=(Step("bias", "col", "bfloat16"),))
    kernel, inputs = load_tma_kernel(fake, problem, "converted"), make_inputs(problem, 0)
    run_kernel(kernel, inputs)
    (workspace,) = fake.workspaces
    assert workspace.numel() == 64 * 256 * 2 == kernel.workspace_bytes
    (name, grid, converted), _ = fake.launches
    assert (name, converted) == ("convert", [inputs.b.data.data_ptr(), workspace.data_ptr(), 64 * 256])
    assert grid == (-(-64 * 256 // CONVERTED_ITEMS), 1)
    _, values = pop_launch(fake, kernel)
    assert (values["a_desc"], values["b_desc"]) == (inputs.a.data_ptr(), workspace.data_ptr())
    assert (values["s_ptr"], values["t0"]) == (inputs.b.scale.data_ptr(), inputs.aux[0].data_ptr())


def test_bound_launch_accepts_views_of_its_operands(fake: FakeDriver) -> None:
    """The ops pass untransposed weights, and scales in the caller's shapes, to a launch that bind returned."""
    problem = fp8_problem(5, 64, 256)
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    launch, out = kernel.bind(inputs.a, inputs.b, inputs.aux), torch.empty(5, 64, dtype=torch.bfloat16)
    launch(out, inputs.a, inputs.b.t(), *[tensor.reshape(-1, 1) for tensor in inputs.aux])
    _, values = pop_launch(fake, kernel)
    kernel.run(inputs.a, inputs.b, inputs.aux, out)
    assert pop_launch(fake, kernel)[1] == values


def test_split_k_has_a_workspace_and_zeroed_semaphores(fake: FakeDriver) -> None:
    kernel = load_kernel(fake, build(20, 200, 256, "bf16"), split=2)
    for _ in range(2):
        run_kernel(kernel, make_inputs(kernel.problem, 0))
    grid, values = pop_launch(fake, kernel)
    assert grid == (2 * 4 * 2, 1)
    assert [workspace.numel() for workspace in fake.workspaces] == [2 * 8 * 16 * 64 * 4] * 2
    assert kernel.workspace_bytes == 2 * 8 * 16 * 64 * 4
    assert values["ws_ptr"] == fake.workspaces[1].data_ptr()
    (memory,) = fake.memory
    assert values["lock_ptr"] == ctypes.addressof(memory)
    assert not any(memory)
    assert fake.mode == 0


def test_semaphores_belong_to_one_stream_or_graph(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs captured on one stream may be replayed concurrently with each other and with the stream."""
    monkeypatch.setattr(shared, "_SEMAPHORE_POOL_BYTES", 128)
    small = load_kernel(fake, build(20, 200, 256, "bf16"), split=2)  # 8 counters
    large = load_kernel(fake, build(40, 200, 256, "bf16"), split=2)  # 12

    def counters(kernel: GpuKernel) -> int:
        run_kernel(kernel, make_inputs(kernel.problem, 0))
        return pop_launch(fake, kernel)[1]["lock_ptr"]

    counters_of_captures: dict[int, int] = {}
    for capture in (0, 5, 0, 6, 5):
        fake.capture = capture
        counters_of_captures.setdefault(capture, counters(small))
        assert counters(small) == counters_of_captures[capture]  # each launch has these counters
        assert fake.mode == 0
    assert len(set(counters_of_captures.values())) == 3
    large_counters = counters(large)  # more counters than the last capture has
    assert large_counters not in counters_of_captures.values()
    assert counters(small) == large_counters
    ranges = sorted(
        (start, start + 4 * count)
        for start, count in [*[(address, 8) for address in counters_of_captures.values()], (large_counters, 12)]
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert len(fake.memory) == 2
    assert not any(any(memory) for memory in fake.memory)


@pytest.mark.parametrize("m", [200, 3])
def test_stream_k_workspace_has_a_slot_per_program(m: int, fake: FakeDriver) -> None:
    """The grid has a program per multiprocessor for any number of tiles."""
    kernel = load_tma_kernel(fake, build(200, 192, 256, "bf16"), "persistent", stream=1)
    run_kernel(kernel, make_inputs(kernel.problem.with_m(m), 0))
    grid, values = pop_launch(fake, kernel)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert grid == (multiprocessors, 1)
    assert values["PROGRAMS"] == multiprocessors
    assert values["lock_ptr"]
    (workspace,) = fake.workspaces
    assert values["ws_ptr"] == workspace.data_ptr()
    assert workspace.numel() == kernel.workspace_bytes == multiprocessors * 64 * 64 * 4


def test_misaligned_operands_are_copied(fake: FakeDriver) -> None:
    problem = build(40, 200, 256, "bf16")
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    misaligned = torch.empty(40 * 256 + 1, dtype=torch.bfloat16)[1:].view(40, 256)
    out = torch.zeros(40 * 200 + 3, dtype=torch.bfloat16)[3:].view(40, 200)
    kernel.run(misaligned, inputs.b, (), out)
    _, values = pop_launch(fake, kernel)
    assert values["b_ptr"] == inputs.b.data_ptr()
    assert values["a_ptr"] != misaligned.data_ptr()
    assert values["c_ptr"] != out.data_ptr()
    assert not (values["a_ptr"] | values["c_ptr"]) % 16


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_misaligned_batches_are_copied(fake: FakeDriver, name: str) -> None:
    """Kernels use the batch strides of the operands. Copies of expanded and overlapping operands have equal values."""
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    kernel = load_kernel(fake, problem)
    a, b = LAYOUTS[name](torch.randn(3, 20, 128).bfloat16()), torch.randn(3, 128, 72).bfloat16()
    operands: list[torch.Tensor] = []

    def read_operand(grid: tuple[int, int], arguments: list[int]) -> None:
        values = dict(zip(kernel.header.arguments, arguments, strict=True))
        count = 2 * values["batch_a"] + 20 * 128
        memory = (ctypes.c_char * (2 * count)).from_address(values["a_ptr"])
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        operands.append(flat.as_strided(a.shape, (values["batch_a"], 128, 1)).clone())
        assert (values["a_ptr"] == a.data_ptr()) == (a.data_ptr() % 16 == 0)
        assert values["a_ptr"] % 16 == 0
        assert values["b_ptr"] == b.data_ptr()

    fake.run = read_operand
    for _ in range(2):
        kernel.run(a, b, (), torch.empty(3, 20, 72, dtype=torch.bfloat16))
        assert torch.equal(operands[-1], a)


def test_dense_batches_are_copied_by_their_strides_after_an_odd_copy(fake: FakeDriver) -> None:
    """A cached launch copies a dense operand by its own strides after it copied an operand with odd strides."""
    problem = bmm_problem(3, 20, 72, 128, "bfloat16")
    kernel, b = load_kernel(fake, problem), torch.randn(3, 128, 72).bfloat16()
    odd = LAYOUTS["odd start and batch stride"](torch.randn(3, 20, 128).bfloat16())
    dense = LAYOUTS["odd start"](torch.randn(3, 20, 128).bfloat16())
    for a in (odd, dense):
        operands: list[torch.Tensor] = []

        def read_operand(grid: tuple[int, int], arguments: list[int], operands: list[torch.Tensor] = operands) -> None:
            memory = (ctypes.c_char * (2 * 3 * 20 * 128)).from_address(arguments[0])
            operands.append(torch.frombuffer(memory, dtype=torch.bfloat16).view(3, 20, 128).clone())

        fake.run = read_operand
        kernel.run(a, b, (), torch.empty(3, 20, 72, dtype=torch.bfloat16))
        assert torch.equal(operands[-1], a)


def test_threads_have_their_own_argument_arrays(fake: FakeDriver) -> None:
    problem = build(40, 200, 256, "bf16")
    kernel, inputs = load_kernel(fake, problem), make_inputs(problem, 0)
    run_kernel(kernel, inputs)
    other = threading.Thread(target=run_kernel, args=(kernel, inputs))
    other.start()
    other.join()
    run_kernel(kernel, inputs)
    assert fake.argument_arrays[0] == fake.argument_arrays[2] != fake.argument_arrays[1]


def test_launch_errors_are_raised_and_a_missing_context_is_created(fake: FakeDriver) -> None:
    kernel = load_kernel(fake, build(40, 200, 256, "bf16"))
    inputs = make_inputs(kernel.problem, 0)
    fake.statuses = [201]
    run_kernel(kernel, inputs)
    assert len(fake.launches) == 1
    fake.statuses = [1]
    with pytest.raises(KernelError, match="launching tiled: CUDA error 1"):
        run_kernel(kernel, inputs)
