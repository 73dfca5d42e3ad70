"""Tests of measuring on a GPU: operands, oracle, clock, and workers that survive candidates that break the context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target, current_cuda
from gemmtune.core.weights import QuantWeight
from gemmtune.store import MemoryStore
from gemmtune.testing import hostile, hostile_cuda
from gemmtune.timing.clock import Latency
from gemmtune.timing.cuda_clock import CudaClock
from gemmtune.timing.cuda_screening import screening_times
from gemmtune.timing.flush import Flush
from gemmtune.timing.nvml import cuda_machine
from gemmtune.timing.torch_gpu import TorchGpu
from gemmtune.tuning.tuner import Budget, Tuner
from gemmtune.verify.inputs import Inputs, make_inputs, timing_sets
from gemmtune.verify.oracle import reference
from gemmtune.verify.verify import make_reference_cases, verify
from gemmtune.workers.contract import Limits, WorkerLost
from gemmtune.workers.worker import Worker

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
COL = Layout("col")
PROBLEM = Problem("mm", 16, 512, 1024, Operand("bfloat16"), Operand("bfloat16", COL, constant=True), "bfloat16")
INT8 = Problem("int_mm", 32, 96, 4096, Operand("int8"), Operand("int8", COL, constant=True), "int32", acc="int32")
# The driver needs some time to end a process whose kernel does not return.
FAST = Limits(try_s=6.0, race_slack_s=6.0)

EPILOGUE = (
    Step("scale", "row", "float32"),
    Step("bias", "col", "bfloat16"),
    Step("gelu_tanh"),
    Step("add", "full", "float32"),
)
PROBLEMS = {
    "bf16": PROBLEM,
    "fp16 gaps": replace(PROBLEM, a=Operand("float16", Layout("row", 1032)), b=Operand("float16"), out_dtype="float16"),
    "fp32": Problem("mm", 33, 65, 127, Operand("float32"), Operand("float32"), "float32"),
    "epilogue": replace(PROBLEM, epilogue=EPILOGUE),
    "bmm": Problem("bmm", 8, 24, 40, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", batch=3),
    "int8": INT8,
    "requantised": replace(
        INT8, out_dtype="int8", epilogue=(Step("scale", "row", "float32"), Step("scale", "col", "float32"))
    ),
    "int64": Problem("mm", 4, 5, 6, Operand("int64"), Operand("int64"), "int64", acc="int64"),
    "fp8": Problem(
        "scaled_mm", 16, 64, 512, Operand("float8_e4m3fn"), Operand("float8_e4m3fn", COL, constant=True), "bfloat16",
        (Step("scale", "row", "float32"), Step("scale", "col", "float32")),
    ),
    "weight-only int8": Problem(
        "mixed_mm", 5, 64, 512, Operand("bfloat16"), Operand("int8", COL, True, quant=Quant()), "bfloat16"
    ),
    "weight-only int4": Problem(
        "mixed_mm", 5, 64, 511, Operand("bfloat16"),
        Operand("int4", COL, True, quant=Quant(128, "bfloat16", True)), "bfloat16",
    ),
    "many rows": Problem("mm", 1024, 3000, 2048, Operand("bfloat16"), Operand("bfloat16", COL), "bfloat16"),
}  # fmt: skip


def to_device(item: Any, device: str) -> Any:
    """Return an operand on another device, in the same layout."""
    if isinstance(item, QuantWeight):
        zero = None if item.zero_point is None else item.zero_point.to(device)
        return replace(item, data=item.data.to(device), scale=item.scale.to(device), zero_point=zero)
    return item.to(device)


# --- operands and oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_operands_are_on_the_device_and_depend_on_the_seed_alone(name: str) -> None:
    problem = PROBLEMS[name]
    one, two = (make_inputs(problem, 3, device=CUDA) for _ in range(2))
    other = make_inputs(problem, 4, device=CUDA)
    assert one.a.is_cuda
    assert all(t.is_cuda for t in one.aux)
    assert torch.equal(one.a.double(), two.a.double())
    assert not torch.equal(one.a.double(), other.a.double())
    assert bool(one.a.double().isfinite().all())


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_oracle_on_a_gpu_agrees_with_the_oracle_on_a_cpu(name: str) -> None:
    problem = PROBLEMS[name]
    inputs = make_inputs(problem, 5, device=CUDA)
    on_gpu = reference(problem, inputs.a, inputs.b, inputs.aux)
    on_cpu = reference(problem, inputs.a.cpu(), to_device(inputs.b, "cpu"), [t.cpu() for t in inputs.aux])
    assert on_gpu.value.is_cuda
    assert on_gpu.magnitude.is_cuda
    close = {"rtol": 1e-4, "atol": 1e-3} if name == "many rows" else {"rtol": 1e-9, "atol": 1e-9}  # float32 on a CPU
    torch.testing.assert_close(on_gpu.value.cpu().double(), on_cpu.value.double(), **close)
    factor = 2.0 if name == "many rows" else 1.0  # for the CPU oracle's own float32 sums
    torch.testing.assert_close(factor * on_gpu.magnitude.cpu(), on_cpu.magnitude, rtol=1e-4, atol=1e-12)


def test_the_oracle_does_not_use_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        inputs = make_inputs(PROBLEMS["fp32"], 5, device=CUDA)
        on_gpu = reference(PROBLEMS["fp32"], inputs.a, inputs.b)
    finally:
        torch.set_float32_matmul_precision(before)
    assert isinstance(inputs.b, torch.Tensor)
    torch.testing.assert_close(on_gpu.value, inputs.a.double() @ inputs.b.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_correct_kernel_is_accepted(name: str) -> None:
    problem = PROBLEMS[name]
    assert verify(hostile.correct(problem), problem, make_reference_cases(problem, 1, device=CUDA)).ok


@pytest.mark.parametrize("problem", [PROBLEM, INT8, PROBLEMS["fp32"]], ids=["bf16", "int8", "fp32"])
@pytest.mark.parametrize("fault", [name for name in hostile.FAULTY_KERNELS if name != "reversed epilogue"])
def test_planted_faults_are_rejected(fault: str, problem: Problem) -> None:
    if fault == "NaN swallowed" and problem is INT8:
        pytest.skip("integers have no NaN")
    assert not verify(hostile.FAULTY_KERNELS[fault](problem), problem, make_reference_cases(problem, 0, device=CUDA)).ok


def test_timing_sets_are_distinct_and_on_the_device() -> None:
    one, two = timing_sets(PROBLEM, 2, 7, CUDA)
    assert isinstance(one.b, torch.Tensor)
    assert isinstance(two.b, torch.Tensor)
    assert one.b.is_cuda
    assert float((one.b == two.b).float().mean()) < 0.05


# --- the clock ---------------------------------------------------------------------------------------------------


def sleep_kernel(cycles: int) -> Any:
    """Return a call that keeps the GPU busy for a number of cycles."""
    return lambda i: torch.cuda._sleep(cycles)


@pytest.mark.parametrize("latency", ["graph", "eager"])
def test_twice_the_work_takes_twice_the_time(latency: Latency) -> None:
    target = current_cuda()
    clock = CudaClock(TorchGpu(CUDA), flush=Flush(PROBLEM, target), latency=latency)
    runs = [sleep_kernel(200_000), sleep_kernel(400_000)]
    calls = [clock.calls_for(run, 500e-6) for run in runs]
    pairs = [clock.time_round(runs, calls) for _ in range(9)]
    ratio = sorted(two / one for one, two in pairs)[4]
    assert 1.7 < ratio < 2.3
    conditions = clock.conditions(runs[0], True)
    assert conditions["timed"].startswith(latency)
    assert 0.5 < float(conditions["launch_us"]) < 500.0


def test_captures_work_after_captures_that_failed() -> None:
    """The allocator must leave its capture state: the next capture works, and memory is freed."""
    clock = CudaClock(TorchGpu(CUDA))
    a = torch.randn(64, 64, device=CUDA)

    def synchronizing(_: int) -> None:
        (a @ a).sum().item()

    def plain(_: int) -> None:
        a @ a

    for _ in range(3):
        clock.time_round([synchronizing, plain], [4, 4])
        clock = CudaClock(clock._gpu)
    clock.time_round([synchronizing, plain], [4, 4])
    assert clock.conditions(synchronizing, False)["timed"].startswith("eager: ")
    assert clock.conditions(plain, False) == {"timed": "eager: beside one that cannot be captured"}
    clock = CudaClock(clock._gpu)
    clock.time_round([plain], [4])
    assert clock.conditions(plain, False) == {"timed": "graph"}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del clock
    torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated() <= before


def test_screening_times_of_a_gpu_call() -> None:
    inputs = make_inputs(PROBLEM, 1, device=CUDA)
    out = torch.empty(16, 512, dtype=torch.bfloat16, device=CUDA)
    times = screening_times(
        TorchGpu(CUDA), lambda: torch.mm(inputs.a, inputs.b, out=out), Flush(PROBLEM, current_cuda())
    )
    assert len(times) == 5
    assert 0.0 < min(times) < 1e-3


def test_the_machine_state_of_a_gpu_has_its_frequency() -> None:
    pytest.importorskip("pynvml")
    machine = cuda_machine(CUDA)
    assert machine is not None
    assert machine.read_state().frequency > 0.0


# --- workers -----------------------------------------------------------------------------------------------------


def candidate_of_kind(name: str) -> Candidate:
    """Return the hostile candidate of a kind."""
    return Candidate.make("hostile_cuda", name, kind=name)


@pytest.fixture(scope="module", autouse=True)
def hostile_backend() -> None:
    backends.register("hostile_cuda", hostile_cuda.ENTRY_POINT)


@pytest.fixture(scope="module")
def target() -> Target:
    return current_cuda()


@pytest.fixture(scope="module")
def shared_worker(target: Target) -> Iterator[Worker]:
    with Worker(target, limits=FAST) as worker:
        worker.open(PROBLEM, 1)
        yield worker


def accepts(worker: Worker, name: str = "good") -> bool:
    """Return whether the worker runs a candidate and verification accepts it."""
    verdict = worker.attempt(candidate_of_kind(name), 30.0).verdict
    return verdict is not None and verdict.ok


@pytest.mark.parametrize("name", hostile_cuda.CORRECT_KINDS)
def test_correct_candidates_are_accepted(shared_worker: Worker, name: str) -> None:
    result = shared_worker.attempt(candidate_of_kind(name), 30.0)
    assert result.verdict is not None
    assert result.verdict.ok, result.verdict.detail
    assert len(result.times_s) == 5
    assert shared_worker.confirm(candidate_of_kind(name)).verdict.ok


@pytest.mark.parametrize(
    ("name", "verdict"), [("wrong", "wrong"), ("spills", "wrong"), ("raise", "crashed"), ("oom", "out_of_memory")]
)
def test_a_candidate_with_a_recoverable_fault_does_not_end_the_worker(
    shared_worker: Worker, name: str, verdict: str
) -> None:
    assert accepts(shared_worker)
    pid = shared_worker.pid
    result = shared_worker.attempt(candidate_of_kind(name), 30.0)
    assert result.verdict is not None
    assert result.verdict.kind == verdict, result.verdict.detail
    assert accepts(shared_worker)
    assert shared_worker.pid == pid


# GEMMTUNE_HOSTILE_ROUNDS=100 runs each test 100 times.
@pytest.mark.parametrize("round_", range(int(os.environ.get("GEMMTUNE_HOSTILE_ROUNDS", "1"))))
@pytest.mark.parametrize("name", hostile_cuda.CONTEXT_LOSING_KINDS)
def test_the_next_candidate_works_after_a_lost_context(shared_worker: Worker, name: str, round_: int) -> None:
    assert accepts(shared_worker)
    before = shared_worker.pid
    result = shared_worker.attempt(candidate_of_kind(name), 30.0)
    assert result.verdict is not None
    assert result.verdict.kind == "crashed"
    assert "context is lost" in result.verdict.detail
    assert accepts(shared_worker)
    assert shared_worker.pid not in (None, before)


@pytest.mark.parametrize("round_", range(int(os.environ.get("GEMMTUNE_HOSTILE_ROUNDS", "1"))))
def test_the_next_candidate_works_after_an_endless_kernel(shared_worker: Worker, round_: int) -> None:
    assert accepts(shared_worker)
    result = shared_worker.attempt(candidate_of_kind("spin"), 2.0)
    assert result.verdict is not None
    assert result.verdict.kind == "hung"
    assert accepts(shared_worker)


@pytest.mark.parametrize("name", ["late_illegal", "replayed_illegal", "late_spin", "replayed_spin"])
def test_a_candidate_that_ends_the_worker_in_a_race_is_named(shared_worker: Worker, name: str) -> None:
    names = [candidate_of_kind("good"), candidate_of_kind(name), candidate_of_kind("waits")]
    assert accepts(shared_worker)
    assert accepts(shared_worker, name)
    with pytest.raises(WorkerLost) as caught:
        shared_worker.race(names, 1.0, 0)
    assert caught.value.candidate_id == candidate_of_kind(name).id
    assert shared_worker.race([names[0], names[2]], 1.0, 0).leader is not None


def test_the_samples_of_a_race_have_the_conditions_of_timing(shared_worker: Worker) -> None:
    raced = shared_worker.race([candidate_of_kind(name) for name in hostile_cuda.CORRECT_KINDS], 1.0, 0)
    conditions = {entry.id: entry.sample.conditions for entry in raced.evidence.values() if entry.sample is not None}
    assert conditions[candidate_of_kind("good").id]["timed"] == "eager: beside one that cannot be captured"
    assert conditions[candidate_of_kind("waits").id]["timed"].startswith("eager: ")
    assert "nothing on the current stream" in conditions[candidate_of_kind("elsewhere").id]["timed"]
    assert conditions[candidate_of_kind("good").id]["operands"] == "cold"
    alone = shared_worker.race([candidate_of_kind("good")], 1.0, 0)
    assert [entry.sample.conditions["timed"] for entry in alone.evidence.values() if entry.sample is not None] == [
        "graph"
    ]


def test_a_worker_with_eager_latency_times_eager_calls(target: Target) -> None:
    with Worker(target, limits=FAST, latency="eager") as worker:
        worker.open(PROBLEM, 1)
        raced = worker.race([candidate_of_kind("good"), Candidate.make("aten", "mm")], 1.0, 0)
    assert all(
        entry.sample.conditions["timed"].startswith("eager: as asked")
        for entry in raced.evidence.values()
        if entry.sample
    )


def test_tuning_among_hostile_candidates(target: Target) -> None:
    store = MemoryStore()
    tuner = Tuner(target, ("hostile_cuda",), store, Budget(seconds=120.0), limits=FAST)
    (decision,) = tuner.tune([(PROBLEM, 1)])
    assert decision.outcome in ("winner", "tie")
    verdicts = {row.id: row.verdict.kind for row in decision.evidence if row.verdict is not None}
    assert verdicts[candidate_of_kind("good").id] in ("within_bound", "exact")
    assert verdicts[candidate_of_kind("wrong").id] == "wrong"
    assert verdicts[candidate_of_kind("spin").id] == "hung"
    for name in (*hostile_cuda.CONTEXT_LOSING_KINDS, "late_illegal", "replayed_illegal"):
        assert verdicts[candidate_of_kind(name).id] == "crashed", name
    assert candidate_of_kind("illegal").id in store.failures(target, PROBLEM.key)
    assert decision.find(decision.chosen) is not None


def test_the_imports_of_a_worker_host_do_not_initialize_cuda() -> None:
    """A process with a CUDA context cannot fork workers."""
    script = "import gemmtune.workers.job, sys, torch; sys.exit(torch.cuda.is_initialized())"
    process = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert process.returncode == 0


def test_the_parent_process_computes_after_all_faults(target: Target) -> None:
    """This test runs after the tests whose candidates lose their context."""
    a = torch.ones(8, 8, device=CUDA)
    assert float((a @ a).sum()) == 512.0
    inputs = make_inputs(PROBLEM, 1, device=CUDA)
    assert isinstance(inputs, Inputs)
