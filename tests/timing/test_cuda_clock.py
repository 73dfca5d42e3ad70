"""The GPU's clock and screening times on a simulated device, its machine state, and timing on GPU Targets."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune.backends.base import Artifact, Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight
from gemmtune.testing.clock import FakeGpu
from gemmtune.timing import cuda_clock, devices, nvml
from gemmtune.timing.clock import FLOOR_S, Clock, Run
from gemmtune.timing.cuda_clock import CudaClock
from gemmtune.timing.cuda_screening import screening_times
from gemmtune.timing.flush import last_level_cache
from gemmtune.timing.machine import MachineState
from gemmtune.timing.nvml import CudaMachine, CudaState, cuda_machine
from gemmtune.timing.race import Entrant, race
from gemmtune.timing.race_entry import EntrantError
from gemmtune.timing.race_operands import RaceOperands
from gemmtune.verify.inputs import operand_bytes, operand_set_count
from gemmtune.workers import job
from gemmtune.workers.job import ContextLost, RequestHandler
from gemmtune.workers.protocol import Attempt, Open, Setup

MB = 1 << 20
H200 = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 60 * MB), cores=132)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def linear(m: int, n: int, k: int) -> Problem:
    return Problem("mm", m, n, k, Operand("bfloat16"), Operand("bfloat16", Layout("col"), constant=True), "bfloat16")


# --- graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "calls"), [(2e-6, 250), (5e-6, 100), (100e-6, 5), (1e-3, 1), (0.1, 1), (1e-7, 384)]
)
def test_call_count_reaches_the_minimum_time(gpu: FakeGpu, seconds: float, calls: int) -> None:
    assert CudaClock(gpu).calls_for(gpu.kernel(seconds), FLOOR_S) == pytest.approx(calls, rel=0.01, abs=1)


def test_call_count_ignores_a_slow_first_call(gpu: FakeGpu) -> None:
    first_s = [5e-3]
    plain = gpu.kernel(50e-6)
    slow = gpu.kernel(5e-3)
    assert CudaClock(gpu).calls_for(lambda i: (slow if first_s and first_s.pop() else plain)(i), FLOOR_S) in (10, 11)


@pytest.mark.parametrize(("launch_s", "most"), [(5e-6, 6), (200e-6, 6)])
def test_calls_are_counted_by_few_of_them(gpu: FakeGpu, launch_s: float, most: int) -> None:
    """Where a pause hid their launching: a launch of 200 us takes longer than the first pause."""
    launched: list[int] = []
    kernel = gpu.kernel(10e-6, launch_s)

    def run(index: int) -> None:
        launched.append(index)
        kernel(index)

    assert CudaClock(gpu).calls_for(run, FLOOR_S) == pytest.approx(50, abs=1)
    assert len(launched) <= most


def test_graph_times_exclude_launch_overhead(gpu: FakeGpu) -> None:
    """The kernels take 5 and 20 us, and their launches take the host ten times as long."""
    clock, runs = CudaClock(gpu), [gpu.kernel(5e-6, 50e-6), gpu.kernel(20e-6, 200e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    assert calls == pytest.approx([100, 25], abs=1)
    assert clock.time_round(runs, calls) == pytest.approx([5e-6, 20e-6], rel=1e-3)


def test_graph_is_captured_again_only_for_more_calls(gpu: FakeGpu) -> None:
    clock, run = CudaClock(gpu), gpu.kernel(10e-6)
    clock.calls_for(run, FLOOR_S)
    for calls in (50, 50, 51, 55, 56):
        clock.time_round([run], [calls])
    assert [entry for entry in gpu.log if entry.startswith("capture")] == ["capture 56"]
    clock.time_round([run], [57])
    assert [entry for entry in gpu.log if entry.startswith("capture")] == ["capture 56", "capture 64"]


def test_call_counts_are_rounded_to_graph_sizes(gpu: FakeGpu) -> None:
    clock, runs = CudaClock(gpu), [gpu.kernel(10e-6), gpu.kernel(11e-6)]
    clock.time_round(runs, [50, 50])
    assert gpu.log.count("capture 56") == 2
    counts = {1: 1, 2: 2, 3: 3, 7: 7, 8: 8, 9: 10, 50: 56, 384: 384, 385: 384, 10_000: 384}
    assert {n: cuda_clock._rounded(n) for n in counts} == counts


def test_round_is_enqueued_after_a_sleep_with_a_flush_before_each_replay(gpu: FakeGpu) -> None:
    clock, runs = CudaClock(gpu, flush=gpu.chill), [gpu.kernel(10e-6), gpu.kernel(20e-6)]
    clock.time_round(runs, [56, 28])
    gpu.log.clear()
    clock.time_round(runs, [56, 28])
    assert gpu.log == ["sleep", "chill", "mark", "replay 56", "chill", "mark", "replay 28"]


def test_each_timing_starts_at_the_first_operand_set(gpu: FakeGpu) -> None:
    sets_by_kernel: dict[str, list[int]] = {"a": [], "b": []}
    runs = [gpu.kernel(10e-6, before=sets_by_kernel[name].append) for name in "ab"]
    CudaClock(gpu).time_round(runs, [4, 6])
    assert sets_by_kernel == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3, 4, 5]}


def test_uncapturable_kernels_are_launched_eagerly_with_a_condition(gpu: FakeGpu) -> None:
    clock = CudaClock(gpu)
    runs = [gpu.kernel(5e-6, 30e-6, uncapturable=True), gpu.kernel(5e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    for _ in range(2):
        assert clock.time_round(runs, calls) == pytest.approx([5e-6, 5e-6], rel=1e-3)
    assert clock.conditions(runs[0], False) == {"timed": "eager: operation not permitted when stream is capturing"}
    assert clock.conditions(runs[1], False) == {"timed": "eager: beside one that cannot be captured"}
    assert clock.time_round(runs[1:], calls[1:]) == pytest.approx([5e-6], rel=1e-3)
    assert sum(entry.startswith("capture") for entry in gpu.log) == 1  # capture is not retried in each round


@pytest.mark.parametrize("reason", ["nothing on the current stream", "operation not permitted"])
def test_kernels_off_the_stream_are_timed_by_the_host(gpu: FakeGpu, reason: str) -> None:
    """An empty graph or stream takes no time; a candidate must not win by that."""
    run = gpu.kernel(100e-6, 10e-6, elsewhere=True, uncapturable=reason.startswith("operation"))
    clock = CudaClock(gpu)
    calls = clock.calls_for(run, FLOOR_S)
    for _ in range(2):
        (seconds,) = clock.time_round([run], [calls])
        assert seconds == pytest.approx(110e-6, rel=0.2)
    assert reason in clock.conditions(run, False)["timed"]


def test_eager_latency_includes_launch_overhead(gpu: FakeGpu) -> None:
    clock = CudaClock(gpu, latency="eager")
    runs = [gpu.kernel(5e-6, 30e-6), gpu.kernel(80e-6, 30e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    assert clock.time_round(runs, calls) == pytest.approx([30e-6, 80e-6], rel=0.1)
    assert not any(entry.startswith("capture") for entry in gpu.log)
    assert clock.conditions(runs[0], False)["timed"].startswith("eager: as asked for")


def test_conditions_of_finalists_have_the_launch_time(gpu: FakeGpu) -> None:
    """The launch time does not depend on the kernel's time: the launches fit into the queue."""
    clock, calls = CudaClock(gpu), []
    run = gpu.kernel(40e-6, 7.9e-6, before=calls.append)
    clock.time_round([run], [8])
    calls.clear()
    assert clock.conditions(run, True)["launch_us"] == "7.9"
    assert len(calls) >= 200
    assert "launch_us" not in clock.conditions(run, False)
    assert clock.conditions(gpu.kernel(1e-6), True) == {}  # never timed


def test_error_while_measuring_the_launch_time_keeps_the_timings(gpu: FakeGpu) -> None:
    raises: list[int] = []

    def before(_: int) -> None:
        if raises:
            raise ValueError("no more")

    clock, run = CudaClock(gpu), gpu.kernel(40e-6, before=before)
    clock.time_round([run], [8])
    raises.append(1)
    assert clock.conditions(run, True) == {"timed": "graph"}


# --- faults ------------------------------------------------------------------------------------------------------


def set_marker(marker: bytearray, number: int) -> Callable[[int], None]:
    def before(_: int) -> None:
        marker[0] = number

    return before


def test_fault_in_the_first_call_is_raised_and_marked(gpu: FakeGpu) -> None:
    marker = bytearray(1)
    run = gpu.kernel(1e-5, fault=lambda: "illegal memory access", before=set_marker(marker, 7))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaClock(gpu, marker=marker).calls_for(run, FLOOR_S)
    assert marker[0] == 7


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_fault_in_a_replay_is_marked_with_the_running_entry(gpu: FakeGpu, culprit: int) -> None:
    """All entries are enqueued before the fault; only the marker on the stream tells which one ran."""
    marker, error = bytearray(1), [""]
    clock = CudaClock(gpu, marker=marker)

    def fault(index: int) -> Callable[[], str]:
        return lambda: error[0] if index == culprit else ""

    runs = [gpu.kernel(1e-5, fault=fault(i), before=set_marker(marker, i + 1)) for i in range(3)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    clock.time_round(runs, calls)
    error[0] = "unspecified launch failure"
    with pytest.raises(RuntimeError, match="launch failure"):
        clock.time_round(runs, calls)
    assert marker[0] == culprit + 1


# --- races -------------------------------------------------------------------------------------------------------


def test_race_on_a_simulated_gpu(gpu: FakeGpu) -> None:
    clock: Clock = CudaClock(gpu, flush=gpu.chill)
    entrants = [
        Entrant("aten", gpu.kernel(20e-6, 8e-6), is_baseline=True),
        Entrant("ours", gpu.kernel(15e-6, 12e-6)),
        Entrant("shy", gpu.kernel(16e-6, 12e-6, uncapturable=True)),
        Entrant("slow", gpu.kernel(90e-6, 5e-6)),
    ]
    result = race(entrants, clock, 2.0)
    assert (result.outcome, result.leader) == ("winner", "ours")
    conditions = {name: row.sample.conditions for name, row in result.evidence.items() if row.sample is not None}
    assert [conditions["ours"].get(name) for name in ("timed", "launch_us")] == [
        "eager: beside one that cannot be captured", "12.0",
    ]  # fmt: skip
    assert conditions["aten"]["launch_us"] == "8.0"
    assert conditions["shy"]["timed"].startswith("eager: raised RuntimeError: operation not permitted")
    assert "launch_us" not in conditions["slow"]
    assert result.evidence["ours"].sample.median_s == pytest.approx(15e-6, rel=1e-3)  # type: ignore[union-attr]


def test_latency_changes_the_winner(gpu: FakeGpu) -> None:
    entrants = [
        Entrant("aten", gpu.kernel(12e-6, 8e-6), is_baseline=True),
        Entrant("quick on the device", gpu.kernel(6e-6, 30e-6)),
    ]
    assert race(entrants, CudaClock(gpu), 2.0).outcome == "winner"
    assert race(entrants, CudaClock(gpu, latency="eager"), 2.0).outcome == "tie"


def test_entry_that_raises_has_failed(gpu: FakeGpu) -> None:
    def fail(_: int) -> None:
        raise ValueError("not today")

    entrants = [Entrant("aten", gpu.kernel(12e-6), is_baseline=True), Entrant("bad", fail)]
    result = race(entrants, CudaClock(gpu), 1.0)
    assert result.evidence["bad"].stage == "failed"
    assert "not today" in result.evidence["bad"].reason


def test_entry_errors_during_capture_affect_no_other_entry(gpu: FakeGpu) -> None:
    """An entry that raises in each capture is timed eagerly; the race handles one that raises when it is launched."""
    clock = CudaClock(gpu)
    good, bad = gpu.kernel(1e-5), gpu.kernel(1e-5, uncapturable=True)
    assert clock.time_round([good, bad], [50, 50]) == pytest.approx([1e-5, 1e-5], rel=1e-3)

    def guarded(_: int) -> None:
        raise EntrantError(None, ValueError("late"))  # type: ignore[arg-type]

    with pytest.raises(EntrantError):
        clock.time_round([guarded], [5])


# --- screening times ---------------------------------------------------------------------------------------------


def test_screening_times_are_cold_and_exclude_launch_overhead(gpu: FakeGpu) -> None:
    run = gpu.kernel(12e-6, 60e-6)
    assert screening_times(gpu, lambda: run(0), gpu.chill) == pytest.approx([12e-6] * 5, rel=0.5)
    assert gpu.log == ["sleep"] + ["chill"] * 5


def test_screening_times_include_launch_overhead_for_eager_latency(gpu: FakeGpu) -> None:
    run = gpu.kernel(12e-6, 60e-6)
    assert screening_times(gpu, lambda: run(0), gpu.chill, None, "eager") == pytest.approx([60e-6] * 5)


@pytest.mark.parametrize(
    ("seconds", "cutoff_s", "times"), [(2.0, 0.1, 1), (30e-3, 1e-3, 1), (60e-3, None, 1), (10e-3, None, 2)]
)
def test_slow_kernels_are_screened_with_few_calls(
    gpu: FakeGpu, seconds: float, cutoff_s: float | None, times: int
) -> None:
    run = gpu.kernel(seconds)
    assert screening_times(gpu, lambda: run(0), gpu.chill, cutoff_s) == pytest.approx([seconds] * times, rel=1e-2)


@pytest.mark.parametrize(("setting_up_s", "is_timed"), [(1.5, True), (2.5, False)])
def test_first_call_that_compiles_is_not_a_screening_time(gpu: FakeGpu, setting_up_s: float, is_timed: bool) -> None:
    first, later = gpu.kernel(12e-6, setting_up_s), gpu.kernel(12e-6, 60e-6)
    calls = iter([first])
    times = screening_times(gpu, lambda: next(calls, later)(0), gpu.chill, 20e-6)
    assert times == pytest.approx([12e-6] * 5 if is_timed else [setting_up_s], rel=0.5)


def test_screening_times_of_kernels_off_the_stream(gpu: FakeGpu) -> None:
    run = gpu.kernel(50e-6, 10e-6, elsewhere=True)
    assert screening_times(gpu, lambda: run(0), gpu.chill) == pytest.approx([60e-6])


def test_screening_raises_the_kernels_error(gpu: FakeGpu) -> None:
    run = gpu.kernel(1e-5, fault=lambda: "misaligned address")
    with pytest.raises(RuntimeError, match="misaligned"):
        screening_times(gpu, lambda: run(0), gpu.chill)


# --- machine state -----------------------------------------------------------------------------------------------


class FakeNvml(types.SimpleNamespace):
    """Fake of the module ``pynvml`` on a machine with one GPU."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    mhz, mask = 1980, 0x1

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", 1)
        return self.mhz

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.mask


def test_gpu_state_has_the_clock_and_the_throttle_reasons() -> None:
    nvml_module = FakeNvml()
    machine = CudaMachine(nvml_module, "handle")
    before = machine.read_state()
    assert before == CudaState(frequency=1980.0)
    assert before.words() == {"clock": "1980 MHz"}
    nvml_module.mhz, nvml_module.mask = 1935, 0x1 | 0x2
    assert before.differs(machine.read_state()) == ""  # idle, and application clocks: no slowdown
    nvml_module.mask = 0x4 | 0x20
    assert before.differs(machine.read_state()) == "slowed down by power cap, temperature (software)"
    assert machine.read_state().words()["throttle"] == "power cap, temperature (software)"
    assert machine.read_state().differs(before) == ""  # a reason that ended is no difference
    before_it_slowed = machine.read_state()
    nvml_module.mhz = 1700
    assert "1935 to 1700 MHz" in before_it_slowed.differs(machine.read_state())
    assert before.differs(MachineState()) == ""


def test_throttle_reasons_of_an_older_nvml() -> None:
    nvml_module = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVMLError=FakeNvml.NVMLError,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1410,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x8,
    )
    assert CudaMachine(nvml_module, "h").read_state().throttle == ("hardware slowdown",)


def test_unsupported_nvml_queries_return_an_empty_state() -> None:
    def fail(*_: object) -> int:
        raise FakeNvml.NVMLError("not supported")

    nvml_module = FakeNvml()
    nvml_module.nvmlDeviceGetClockInfo = nvml_module.nvmlDeviceGetCurrentClocksEventReasons = fail
    assert CudaMachine(nvml_module, "handle").read_state() == CudaState()
    assert CudaState().words() == {}


@pytest.mark.parametrize(("uuid", "is_found"), [("1234", True), ("5678", False)])
def test_nvml_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str, is_found: bool) -> None:
    monkeypatch.setattr(nvml.importlib, "import_module", lambda name: FakeNvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=uuid))
    assert (cuda_machine(torch.device("cuda")) is not None) == is_found


def test_machine_is_none_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(nvml.importlib, "import_module", missing)
    assert cuda_machine(torch.device("cuda")) is None


# --- timing on GPU Targets ---------------------------------------------------------------------------------------


def test_operand_sets_exceed_the_l2_within_two_gigabytes() -> None:
    for problem in (linear(1, 4096, 4096), linear(16, 1024, 4096), linear(4096, 22016, 4096), linear(1, 64, 64)):
        count, size = operand_set_count(problem, H200), operand_bytes(problem)
        assert 2 <= count <= 64
        assert count * size > 16 * 60 * MB or count == 64 or (count + 1) * size > 2 << 30
        assert count * size <= max(2 << 30, 2 * size)


def test_the_last_level_cache_of_a_gpu_is_its_l2() -> None:
    assert last_level_cache(H200) == 60 * MB
    assert last_level_cache(Target("cuda", "x", "9.0", caches=(232448, 0, 0))) == 32 * MB


class FakeGpuKernel(Kernel):
    """Kernel that only takes time on a FakeGpu, and records the addresses of B and of the outputs."""

    def __init__(self, gpu: FakeGpu, seconds: float, name: str, problem: Problem, packing: str | None = None) -> None:
        self.candidate = Candidate.make("aten" if name == "aten" else "x", name)
        self.problem, self.packing = problem, packing
        self.b_addresses: list[int] = []
        self.output_addresses: list[int] = []
        self._work = gpu.kernel(seconds)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.b_addresses.append((b.data[0] if isinstance(b, PackedWeight) else b).data_ptr())
        self.output_addresses.append(out.data_ptr())
        self._work(0)

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(str(self.packing), (b.clone(),), self.problem.n, self.problem.k, "bfloat16")


@pytest.fixture
def simulated_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Put operands of GPU Targets into this machine's memory, and run their kernels on ``gpu``."""
    monkeypatch.setattr(Target, "torch_device", property(lambda self: torch.device("cpu")))
    monkeypatch.setattr(devices, "TorchGpu", lambda device: gpu)
    monkeypatch.setattr(devices, "cuda_machine", lambda device: None)
    return gpu


SMALL = Target("cuda", "small", "9.0", caches=(232448, 0, MB), cores=4)


def test_kernels_of_a_race_rotate_over_one_sequence_of_operand_sets(simulated_gpu: FakeGpu) -> None:
    problem = linear(1, 256, 512)
    kernels = [FakeGpuKernel(simulated_gpu, 8e-6, "aten", problem), FakeGpuKernel(simulated_gpu, 7e-6, "y", problem)]
    kernels.append(FakeGpuKernel(simulated_gpu, 9e-6, "packed", problem, "x:p"))
    operands = RaceOperands({k.candidate.id: k for k in kernels}, problem, devices.of(SMALL), 0, None)
    result = operands.race(2.0, 0, lambda leading: None)
    assert (result.outcome, result.leader) == ("winner", "x/y")
    for placement in result.evidence.values():
        assert placement.sample is not None
        assert placement.sample.conditions["operands"] == "cold"
        assert placement.sample.conditions["timed"] == "graph"
        assert "threads" not in placement.sample.conditions
        assert "load" not in placement.sample.conditions
    raw_addresses = kernels[0].b_addresses
    copies = operand_set_count(problem, SMALL)
    assert len(set(raw_addresses)) == copies == len(set(kernels[2].b_addresses))
    assert copies * operand_bytes(problem) > 16 * MB
    assert len(set(kernels[0].output_addresses)) == 2  # the outputs stay in the L2
    assert set(kernels[2].output_addresses) == set(kernels[0].output_addresses)
    assert not set(raw_addresses) & set(kernels[2].b_addresses)
    assert set(itertools.pairwise(kernels[1].b_addresses)) == set(itertools.pairwise(raw_addresses))


class OneKernelBackend:
    """Backend with one kernel, which also computes the product."""

    def __init__(self, kernel: FakeGpuKernel) -> None:
        self.kernel = kernel
        take_time = kernel.run

        def run(a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
            torch.mm(a, b.data[0] if isinstance(b, PackedWeight) else b, out=out)
            take_time(a, b, aux, out)

        kernel.run = run  # type: ignore[method-assign]

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        return Artifact(candidate, "")

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return self.kernel


@pytest.mark.parametrize("packing", [None, "x:p"])
def test_session_on_a_gpu_verifies_times_and_races(
    simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, packing: str | None
) -> None:
    problem = linear(5, 256, 512)
    backend = OneKernelBackend(FakeGpuKernel(simulated_gpu, 8e-6, "y", problem, packing))
    monkeypatch.setattr(job.backends, "get", lambda name: backend)
    session = job.ProblemSession(problem, devices.of(SMALL), 0)
    attempted = session.attempt(backend.kernel.candidate)
    assert attempted.verdict is not None
    assert attempted.verdict.ok, attempted.verdict.detail
    assert attempted.times_s == pytest.approx([8e-6] * 5, rel=0.1)
    assert session.confirm(backend.kernel.candidate).verdict.ok
    result = session.prepare_race([backend.kernel.candidate], None).race(1.0, 0, lambda leading: None)
    assert result.leader == "x/y"


def test_session_for_eager_latency_screens_with_launch_overhead(
    simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = linear(5, 256, 512)
    backend = OneKernelBackend(FakeGpuKernel(simulated_gpu, 8e-6, "y", problem))
    monkeypatch.setattr(job.backends, "get", lambda name: backend)
    session = job.ProblemSession(problem, devices.of(SMALL, "eager"), 0)
    assert session.attempt(backend.kernel.candidate).times_s == pytest.approx([10e-6] * 5)


def test_hot_operands_are_one_set_without_flushes(simulated_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "Flush", lambda problem, target: lambda: pytest.fail("flushed"))
    problem = linear(1, 256, 512)
    kernels = [FakeGpuKernel(simulated_gpu, 8e-6, "aten", problem), FakeGpuKernel(simulated_gpu, 7e-6, "y", problem)]
    operands = RaceOperands(
        {k.candidate.id: k for k in kernels}, problem, devices.of(SMALL, "eager"), 0, None, hot=True
    )
    result = operands.race(1.0, 0, lambda leading: None)
    assert len(set(kernels[0].b_addresses)) == 1
    assert {placement.sample.conditions["operands"] for placement in result.evidence.values() if placement.sample} == {
        "hot"
    }
    assert all(
        placement.sample.conditions["timed"].startswith("eager")
        for placement in result.evidence.values()
        if placement.sample
    )


class FakeDevice:
    """Fake of torch.cuda in a process whose context is lost when ``fault`` is not empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault = ""
        self.limits: list[int] = []
        monkeypatch.setattr(devices, "context_fault", lambda device: self.fault)
        monkeypatch.setattr(devices, "limit_device_memory", lambda device, allowance: self.limits.append(allowance))
        monkeypatch.setattr(job, "limit_memory", lambda allowance: pytest.fail("it limits the address space"))


class FakeSession:
    """ProblemSession whose candidates return or raise ``result``."""

    result: Any = None

    def __init__(self, problem: Problem, timing: devices.DeviceTiming, seed: int) -> None:
        self.latency = timing.latency

    def attempt(self, candidate: object, cutoff_s: float | None) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> RequestHandler:
    monkeypatch.setattr(job, "ProblemSession", FakeSession)
    request_handler = RequestHandler(lambda leading: None)
    threads = torch.get_num_threads()
    request_handler.answer(Setup(H200.to_dict(), latency="eager"))
    torch.set_num_threads(threads)
    return request_handler


ATTEMPT = Attempt({"backend": "aten", "template": "mm", "config": {}})


def test_device_memory_is_limited_instead_of_the_address_space(
    handler: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    handler.answer(Open(linear(1, 8, 8).to_dict(), 0, 1 << 30))
    assert device.limits == [1 << 30]
    assert handler._job is not None
    assert handler._job.latency == "eager"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["crashed", "wrong", "out_of_memory"])
def test_failure_raises_context_lost_only_after_a_context_fault(
    handler: RequestHandler, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device = FakeDevice(monkeypatch)
    handler.answer(Open(linear(1, 8, 8).to_dict()))
    failed = job.Attempted(job.Verdict(kind, "it said so"))  # type: ignore[arg-type]
    monkeypatch.setattr(FakeSession, "result", failed)
    assert handler.answer(ATTEMPT) is failed
    device.fault = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(ContextLost, match=r"illegal memory access.*it said so"):
        handler.answer(ATTEMPT)


def test_exception_raises_context_lost_only_after_a_context_fault(
    handler: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    handler.answer(Open(linear(1, 8, 8).to_dict()))
    monkeypatch.setattr(FakeSession, "result", RuntimeError("in the middle of a race"))
    with pytest.raises(RuntimeError, match=r"^in the middle of a race"):
        handler.answer(ATTEMPT)
    device.fault = "CUDA error: misaligned address"
    with pytest.raises(ContextLost, match=r"misaligned address.*in the middle of a race"):
        handler.answer(ATTEMPT)


def test_first_line_of_a_cuda_error() -> None:
    assert cuda_clock.first_line(RuntimeError("CUDA error: bad\nCUDA kernel errors might be ...")) == "CUDA error: bad"
    assert cuda_clock.first_line(RuntimeError("")) == "RuntimeError"


def test_bound_methods_reuse_a_captured_graph(gpu: FakeGpu) -> None:
    """A race makes a new bound method ``entry.guarded`` each time; the clock must recognise its graph."""

    class Entry:
        run: Run

        def guarded(self, i: int) -> None:
            self.run(i)

    entry, clock = Entry(), CudaClock(gpu)
    entry.run = gpu.kernel(1e-5)  # type: ignore[method-assign]
    for _ in range(3):
        clock.time_round([entry.guarded], [50])
    assert gpu.log.count("capture 56") == 1
