"""The GPU's clock and rough times on a simulated device, its weather, and what a Target of a GPU changes elsewhere."""

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
def test_one_timing_reaches_the_floor(gpu: FakeGpu, seconds: float, calls: int) -> None:
    assert CudaClock(gpu).calls_for(gpu.kernel(seconds), FLOOR_S) == pytest.approx(calls, rel=0.01, abs=1)


def test_a_slow_first_call_is_not_taken_for_the_rest(gpu: FakeGpu) -> None:
    first = [5e-3]
    plain = gpu.kernel(50e-6)
    slow = gpu.kernel(5e-3)
    assert CudaClock(gpu).calls_for(lambda i: (slow if first and first.pop() else plain)(i), FLOOR_S) in (10, 11)


def test_times_are_the_devices_and_launching_is_hidden(gpu: FakeGpu) -> None:
    """Kernels of 5 and 20 us whose launching takes the host ten times as long."""
    clock, runs = CudaClock(gpu), [gpu.kernel(5e-6, 50e-6), gpu.kernel(20e-6, 200e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    assert calls == pytest.approx([100, 25], abs=1)
    assert clock.time_round(runs, calls) == pytest.approx([5e-6, 20e-6], rel=1e-3)


def test_a_graph_is_captured_once_and_again_for_many_more_calls(gpu: FakeGpu) -> None:
    clock, run = CudaClock(gpu), gpu.kernel(10e-6)
    clock.calls_for(run, FLOOR_S)
    for calls in (50, 50, 51, 55, 56):
        clock.time_round([run], [calls])
    assert [entry for entry in gpu.log if entry.startswith("capture")] == ["capture 56"]
    clock.time_round([run], [57])
    assert [entry for entry in gpu.log if entry.startswith("capture")] == ["capture 56", "capture 64"]


def test_equal_counts_make_equal_graphs(gpu: FakeGpu) -> None:
    clock, runs = CudaClock(gpu), [gpu.kernel(10e-6), gpu.kernel(11e-6)]
    clock.time_round(runs, [50, 50])
    assert gpu.log.count("capture 56") == 2
    counts = {1: 1, 2: 2, 3: 3, 7: 7, 8: 8, 9: 10, 50: 56, 384: 384, 385: 384, 10_000: 384}
    assert {n: cuda_clock._rounded(n) for n in counts} == counts


def test_a_round_is_enqueued_behind_one_pause_with_the_cache_emptied_before_each(gpu: FakeGpu) -> None:
    clock, runs = CudaClock(gpu, flush=gpu.chill), [gpu.kernel(10e-6), gpu.kernel(20e-6)]
    clock.time_round(runs, [56, 28])
    gpu.log.clear()
    clock.time_round(runs, [56, 28])
    assert gpu.log == ["sleep", "chill", "mark", "replay 56", "chill", "mark", "replay 28"]


def test_every_timing_begins_with_the_same_operands(gpu: FakeGpu) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    runs = [gpu.kernel(10e-6, before=seen[name].append) for name in "ab"]
    CudaClock(gpu).time_round(runs, [4, 6])
    assert seen == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3, 4, 5]}


def test_what_cannot_be_captured_is_launched_behind_a_pause_and_says_so(gpu: FakeGpu) -> None:
    clock = CudaClock(gpu)
    runs = [gpu.kernel(5e-6, 30e-6, uncapturable=True), gpu.kernel(5e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    for _ in range(2):
        assert clock.time_round(runs, calls) == pytest.approx([5e-6, 5e-6], rel=1e-3)
    assert clock.conditions(runs[0], False) == {"timed": "eager: operation not permitted when stream is capturing"}
    assert clock.conditions(runs[1], False) == {"timed": "eager: beside one that cannot be captured"}
    assert clock.time_round(runs[1:], calls[1:]) == pytest.approx([5e-6], rel=1e-3)
    assert sum(entry.startswith("capture") for entry in gpu.log) == 1  # it is not tried every round


@pytest.mark.parametrize("why", ["nothing on the current stream", "operation not permitted"])
def test_what_is_not_on_the_stream_is_timed_by_the_host(gpu: FakeGpu, why: str) -> None:
    """An empty graph takes no time at all, nor does an empty stream: nobody may win so."""
    run = gpu.kernel(100e-6, 10e-6, elsewhere=True, uncapturable=why.startswith("operation"))
    clock = CudaClock(gpu)
    calls = clock.calls_for(run, FLOOR_S)
    for _ in range(2):
        (seconds,) = clock.time_round([run], [calls])
        assert seconds == pytest.approx(110e-6, rel=0.2)
    assert why in clock.conditions(run, False)["timed"]


def test_latency_eager_counts_launching(gpu: FakeGpu) -> None:
    clock = CudaClock(gpu, latency="eager")
    runs = [gpu.kernel(5e-6, 30e-6), gpu.kernel(80e-6, 30e-6)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    assert clock.time_round(runs, calls) == pytest.approx([30e-6, 80e-6], rel=0.1)
    assert not any(entry.startswith("capture") for entry in gpu.log)
    assert clock.conditions(runs[0], False)["timed"].startswith("eager: as asked for")


def test_the_cost_of_launching_is_said_of_finalists(gpu: FakeGpu) -> None:
    """However long the kernel takes: the host never waits for room in the queue."""
    clock, calls = CudaClock(gpu), []
    run = gpu.kernel(40e-6, 7.9e-6, before=calls.append)
    clock.time_round([run], [8])
    calls.clear()
    assert clock.conditions(run, True)["launch_us"] == "7.9"
    assert len(calls) >= 200
    assert "launch_us" not in clock.conditions(run, False)
    assert clock.conditions(gpu.kernel(1e-6), True) == {}  # never timed


def test_a_finalist_that_raises_when_it_is_launched_once_more_keeps_its_timings(gpu: FakeGpu) -> None:
    bad: list[int] = []

    def before(_: int) -> None:
        if bad:
            raise ValueError("no more")

    clock, run = CudaClock(gpu), gpu.kernel(40e-6, before=before)
    clock.time_round([run], [8])
    bad.append(1)
    assert clock.conditions(run, True) == {"timed": "graph"}


# --- faults ------------------------------------------------------------------------------------------------------


def numbered(marker: bytearray, number: int) -> Callable[[int], None]:
    def before(_: int) -> None:
        marker[0] = number

    return before


def test_a_fault_in_the_first_call_shows_at_once_and_is_marked(gpu: FakeGpu) -> None:
    marker = bytearray(1)
    run = gpu.kernel(1e-5, fault=lambda: "illegal memory access", before=numbered(marker, 7))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaClock(gpu, marker=marker).calls_for(run, FLOOR_S)
    assert marker[0] == 7


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_fault_in_a_replay_is_marked_with_whoever_was_running(gpu: FakeGpu, culprit: int) -> None:
    """All lanes are enqueued when it happens: only the stream knows who it was."""
    marker, wrong = bytearray(1), [""]
    clock = CudaClock(gpu, marker=marker)

    def fault(place: int) -> Callable[[], str]:
        return lambda: wrong[0] if place == culprit else ""

    runs = [gpu.kernel(1e-5, fault=fault(i), before=numbered(marker, i + 1)) for i in range(3)]
    calls = [clock.calls_for(run, FLOOR_S) for run in runs]
    clock.time_round(runs, calls)
    wrong[0] = "unspecified launch failure"
    with pytest.raises(RuntimeError, match="launch failure"):
        clock.time_round(runs, calls)
    assert marker[0] == culprit + 1


# --- races -------------------------------------------------------------------------------------------------------


def test_a_race_on_a_gpu(gpu: FakeGpu) -> None:
    clock: Clock = CudaClock(gpu, flush=gpu.chill)
    field = [
        Entrant("aten", gpu.kernel(20e-6, 8e-6), is_baseline=True),
        Entrant("ours", gpu.kernel(15e-6, 12e-6)),
        Entrant("shy", gpu.kernel(16e-6, 12e-6, uncapturable=True)),
        Entrant("slow", gpu.kernel(90e-6, 5e-6)),
    ]
    result = race(field, clock, 2.0)
    assert (result.outcome, result.leader) == ("winner", "ours")
    words = {name: row.sample.conditions for name, row in result.evidence.items() if row.sample is not None}
    assert [words["ours"].get(name) for name in ("timed", "launch_us")] == [
        "eager: beside one that cannot be captured", "12.0",
    ]  # fmt: skip
    assert words["aten"]["launch_us"] == "8.0"
    assert words["shy"]["timed"].startswith("eager: raised RuntimeError: operation not permitted")
    assert "launch_us" not in words["slow"]
    assert result.evidence["ours"].sample.median_s == pytest.approx(15e-6, rel=1e-3)  # type: ignore[union-attr]


def test_users_without_graphs_choose_another(gpu: FakeGpu) -> None:
    field = [
        Entrant("aten", gpu.kernel(12e-6, 8e-6), is_baseline=True),
        Entrant("quick on the device", gpu.kernel(6e-6, 30e-6)),
    ]
    assert race(field, CudaClock(gpu), 2.0).outcome == "winner"
    assert race(field, CudaClock(gpu, latency="eager"), 2.0).outcome == "tie"


def test_a_lane_that_raises_is_out(gpu: FakeGpu) -> None:
    def fail(_: int) -> None:
        raise ValueError("not today")

    field = [Entrant("aten", gpu.kernel(12e-6), is_baseline=True), Entrant("bad", fail)]
    result = race(field, CudaClock(gpu), 1.0)
    assert result.evidence["bad"].stage == "failed"
    assert "not today" in result.evidence["bad"].reason


def test_errors_of_a_lane_stay_its_own_while_others_are_captured(gpu: FakeGpu) -> None:
    """A lane that raises in every capture is timed eagerly; one that raises when launched is the race's business."""
    clock = CudaClock(gpu)
    good, bad = gpu.kernel(1e-5), gpu.kernel(1e-5, uncapturable=True)
    assert clock.time_round([good, bad], [50, 50]) == pytest.approx([1e-5, 1e-5], rel=1e-3)

    def guarded(_: int) -> None:
        raise EntrantError(None, ValueError("late"))  # type: ignore[arg-type]

    with pytest.raises(EntrantError):
        clock.time_round([guarded], [5])


# --- rough times -------------------------------------------------------------------------------------------------


def test_rough_times_are_cold_and_hide_launching(gpu: FakeGpu) -> None:
    run = gpu.kernel(12e-6, 60e-6)
    assert screening_times(gpu, lambda: run(0), gpu.chill) == pytest.approx([12e-6] * 5, rel=0.5)
    assert gpu.log == ["sleep"] + ["chill"] * 5


def test_rough_times_for_eager_launches_count_launching(gpu: FakeGpu) -> None:
    run = gpu.kernel(12e-6, 60e-6)
    assert screening_times(gpu, lambda: run(0), gpu.chill, None, "eager") == pytest.approx([60e-6] * 5)


@pytest.mark.parametrize(
    ("seconds", "cutoff_s", "times"), [(2.0, 0.1, 1), (30e-3, 1e-3, 1), (60e-3, None, 1), (10e-3, None, 2)]
)
def test_slow_calls_are_made_few_times(gpu: FakeGpu, seconds: float, cutoff_s: float | None, times: int) -> None:
    run = gpu.kernel(seconds)
    assert screening_times(gpu, lambda: run(0), gpu.chill, cutoff_s) == pytest.approx([seconds] * times, rel=1e-2)


def test_rough_times_of_what_is_not_on_the_stream(gpu: FakeGpu) -> None:
    run = gpu.kernel(50e-6, 10e-6, elsewhere=True)
    assert screening_times(gpu, lambda: run(0), gpu.chill) == pytest.approx([60e-6])


def test_rough_times_raise_what_the_kernel_did(gpu: FakeGpu) -> None:
    run = gpu.kernel(1e-5, fault=lambda: "misaligned address")
    with pytest.raises(RuntimeError, match="misaligned"):
        screening_times(gpu, lambda: run(0), gpu.chill)


# --- weather -----------------------------------------------------------------------------------------------------


class Nvml(types.SimpleNamespace):
    """The module ``pynvml`` of a machine with one GPU."""

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


def test_a_gpus_weather() -> None:
    known = Nvml()
    machine = CudaMachine(known, "handle")
    before = machine.weather()
    assert before == CudaState(frequency=1980.0)
    assert before.words() == {"clock": "1980 MHz"}
    known.mhz, known.mask = 1935, 0x1 | 0x2
    assert before.differs(machine.weather()) == ""  # idle, and clocks that were set: nothing slows it down
    known.mask = 0x4 | 0x20
    assert before.differs(machine.weather()) == "slowed down by power cap, temperature (software)"
    assert machine.weather().words()["throttle"] == "power cap, temperature (software)"
    assert machine.weather().differs(before) == ""  # what has gone is no reason
    before_it_slowed = machine.weather()
    known.mhz = 1700
    assert "1935 to 1700 MHz" in before_it_slowed.differs(machine.weather())
    assert before.differs(MachineState()) == ""


def test_an_older_driver_has_another_name_for_it() -> None:
    known = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVMLError=Nvml.NVMLError,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1410,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x8,
    )
    assert CudaMachine(known, "h").weather().throttle == ("hardware slowdown",)


def test_what_cannot_be_read_is_unknown() -> None:
    def fail(*_: object) -> int:
        raise Nvml.NVMLError("not supported")

    known = Nvml()
    known.nvmlDeviceGetClockInfo = known.nvmlDeviceGetCurrentClocksEventReasons = fail
    assert CudaMachine(known, "handle").weather() == CudaState()
    assert CudaState().words() == {}


@pytest.mark.parametrize(("uuid", "found"), [("1234", True), ("5678", False)])
def test_the_machine_is_found_by_the_devices_name(monkeypatch: pytest.MonkeyPatch, uuid: str, found: bool) -> None:
    monkeypatch.setattr(nvml.importlib, "import_module", lambda name: Nvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=uuid))
    assert (cuda_machine(torch.device("cuda")) is not None) == found


def test_no_nvml_is_no_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(nvml.importlib, "import_module", missing)
    assert cuda_machine(torch.device("cuda")) is None


# --- what a Target of a GPU changes ------------------------------------------------------------------------------


def test_operand_sets_exceed_a_gpus_l2_many_times_within_two_gigabytes() -> None:
    for problem in (linear(1, 4096, 4096), linear(16, 1024, 4096), linear(4096, 22016, 4096), linear(1, 64, 64)):
        count, size = operand_set_count(problem, H200), operand_bytes(problem)
        assert 2 <= count <= 64
        assert count * size > 16 * 60 * MB or count == 64 or (count + 1) * size > 2 << 30
        assert count * size <= max(2 << 30, 2 * size)


def test_the_last_level_cache_of_a_gpu_is_its_l2() -> None:
    assert last_level_cache(H200) == 60 * MB
    assert last_level_cache(Target("cuda", "x", "9.0", caches=(232448, 0, 0))) == 32 * MB


class OnGpu(Kernel):
    """Takes time on a FakeGpu alone, and notes which B it was called with, and which outputs."""

    def __init__(self, gpu: FakeGpu, seconds: float, name: str, problem: Problem, packing: str | None = None) -> None:
        self.candidate = Candidate.make("aten" if name == "aten" else "x", name)
        self.problem, self.packing = problem, packing
        self.seen: list[int] = []
        self.outputs: list[int] = []
        self._work = gpu.kernel(seconds)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.seen.append((b.data[0] if isinstance(b, PackedWeight) else b).data_ptr())
        self.outputs.append(out.data_ptr())
        self._work(0)

    def pack(self, b: Any) -> PackedWeight:
        return PackedWeight(str(self.packing), (b.clone(),), self.problem.n, self.problem.k, "bfloat16")


@pytest.fixture
def simulated(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """GPU targets' operands lie in this machine's memory, and their kernels run on ``gpu``."""
    monkeypatch.setattr(Target, "torch_device", property(lambda self: torch.device("cpu")))
    monkeypatch.setattr(devices, "TorchGpu", lambda device: gpu)
    monkeypatch.setattr(devices, "cuda_machine", lambda device: None)
    return gpu


SMALL = Target("cuda", "small", "9.0", caches=(232448, 0, MB), cores=4)


def test_kernels_on_a_gpu_race_on_the_same_operands_in_the_same_order(simulated: FakeGpu) -> None:
    problem = linear(1, 256, 512)
    kernels = [OnGpu(simulated, 8e-6, "aten", problem), OnGpu(simulated, 7e-6, "y", problem)]
    kernels.append(OnGpu(simulated, 9e-6, "packed", problem, "x:p"))
    track = RaceOperands({k.candidate.id: k for k in kernels}, problem, devices.of(SMALL), 0, None)
    raced = track.race(2.0, 0, lambda leading: None)
    assert (raced.outcome, raced.leader) == ("winner", "x/y")
    for place in raced.evidence.values():
        assert place.sample is not None
        assert place.sample.conditions["operands"] == "cold"
        assert place.sample.conditions["timed"] == "graph"
        assert "threads" not in place.sample.conditions
        assert "load" not in place.sample.conditions
    raw = kernels[0].seen
    copies = operand_set_count(problem, SMALL)
    assert len(set(raw)) == copies == len(set(kernels[2].seen))
    assert copies * operand_bytes(problem) > 16 * MB
    assert len(set(kernels[0].outputs)) == 2  # which stay in the L2
    assert set(kernels[2].outputs) == set(kernels[0].outputs)
    assert not set(raw) & set(kernels[2].seen)
    assert set(itertools.pairwise(kernels[1].seen)) == set(itertools.pairwise(raw))


class Room:
    """A backend of one kernel, which computes as well."""

    def __init__(self, kernel: OnGpu) -> None:
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
def test_a_job_on_a_gpu(simulated: FakeGpu, monkeypatch: pytest.MonkeyPatch, packing: str | None) -> None:
    problem = linear(5, 256, 512)
    room = Room(OnGpu(simulated, 8e-6, "y", problem, packing))
    monkeypatch.setattr(job.backends, "get", lambda name: room)
    work = job.ProblemSession(problem, devices.of(SMALL), 0)
    attempted = work.attempt(room.kernel.candidate)
    assert attempted.verdict is not None
    assert attempted.verdict.ok, attempted.verdict.detail
    assert attempted.times_s == pytest.approx([8e-6] * 5, rel=0.1)
    assert work.confirm(room.kernel.candidate).verdict.ok
    raced = work.track([room.kernel.candidate], None).race(1.0, 0, lambda leading: None)
    assert raced.leader == "x/y"


def test_a_job_for_eager_launches_ranks_by_what_launching_costs(
    simulated: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = linear(5, 256, 512)
    room = Room(OnGpu(simulated, 8e-6, "y", problem))
    monkeypatch.setattr(job.backends, "get", lambda name: room)
    session = job.ProblemSession(problem, devices.of(SMALL, "eager"), 0)
    assert session.attempt(room.kernel.candidate).times_s == pytest.approx([10e-6] * 5)


def test_hot_operands_on_a_gpu_are_one_set_and_nothing_is_flushed(
    simulated: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Flush", lambda problem, target: lambda: pytest.fail("flushed"))
    problem = linear(1, 256, 512)
    kernels = [OnGpu(simulated, 8e-6, "aten", problem), OnGpu(simulated, 7e-6, "y", problem)]
    track = RaceOperands({k.candidate.id: k for k in kernels}, problem, devices.of(SMALL, "eager"), 0, None, hot=True)
    raced = track.race(1.0, 0, lambda leading: None)
    assert len(set(kernels[0].seen)) == 1
    assert {place.sample.conditions["operands"] for place in raced.evidence.values() if place.sample} == {"hot"}
    assert all(
        place.sample.conditions["timed"].startswith("eager") for place in raced.evidence.values() if place.sample
    )


class LostDevice:
    """Stands in for torch.cuda in a process whose context is lost once ``fault`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault = ""
        self.limits: list[int] = []
        monkeypatch.setattr(devices, "context_fault", lambda device: self.fault)
        monkeypatch.setattr(devices, "limit_device_memory", lambda device, allowance: self.limits.append(allowance))
        monkeypatch.setattr(job, "limit_memory", lambda allowance: pytest.fail("it limits the address space"))


class OddJob:
    """A Job whose candidates fail as ``result`` says."""

    result: Any = None

    def __init__(self, problem: Problem, timing: devices.DeviceTiming, seed: int) -> None:
        self.latency = timing.latency

    def attempt(self, candidate: object, cutoff_s: float | None) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> RequestHandler:
    monkeypatch.setattr(job, "ProblemSession", OddJob)
    made = RequestHandler(lambda leading: None)
    threads = torch.get_num_threads()
    made.answer(Setup(H200.to_dict(), latency="eager"))
    torch.set_num_threads(threads)
    return made


ATTEMPT = Attempt({"backend": "aten", "template": "mm", "config": {}})


def test_a_gpus_memory_is_limited_not_the_address_space(desk: RequestHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LostDevice(monkeypatch)
    desk.answer(Open(linear(1, 8, 8).to_dict(), 0, 1 << 30))
    assert device.limits == [1 << 30]
    assert desk._job is not None
    assert desk._job.latency == "eager"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["crashed", "wrong", "out_of_memory"])
def test_a_candidate_that_fails_is_answered_as_long_as_the_context_lives(
    desk: RequestHandler, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    device = LostDevice(monkeypatch)
    desk.answer(Open(linear(1, 8, 8).to_dict()))
    failed = job.Attempted(job.Verdict(kind, "it said so"))  # type: ignore[arg-type]
    monkeypatch.setattr(OddJob, "result", failed)
    assert desk.answer(ATTEMPT) is failed
    device.fault = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(ContextLost, match=r"illegal memory access.*it said so"):
        desk.answer(ATTEMPT)


def test_what_is_raised_tells_of_a_lost_context_too(desk: RequestHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LostDevice(monkeypatch)
    desk.answer(Open(linear(1, 8, 8).to_dict()))
    monkeypatch.setattr(OddJob, "result", RuntimeError("in the middle of a race"))
    with pytest.raises(RuntimeError, match=r"^in the middle of a race"):
        desk.answer(ATTEMPT)
    device.fault = "CUDA error: misaligned address"
    with pytest.raises(ContextLost, match=r"misaligned address.*in the middle of a race"):
        desk.answer(ATTEMPT)


def test_torchs_complaint_is_one_line() -> None:
    assert cuda_clock.first_line(RuntimeError("CUDA error: bad\nCUDA kernel errors might be ...")) == "CUDA error: bad"
    assert cuda_clock.first_line(RuntimeError("")) == "RuntimeError"


def test_runs_may_be_bound_methods(gpu: FakeGpu) -> None:
    """A race asks for ``lane.guarded`` anew each time: what is known of it must be found again."""

    class Lane:
        run: Run

        def guarded(self, i: int) -> None:
            self.run(i)

    lane, clock = Lane(), CudaClock(gpu)
    lane.run = gpu.kernel(1e-5)  # type: ignore[method-assign]
    for _ in range(3):
        clock.time_round([lane.guarded], [50])
    assert gpu.log.count("capture 56") == 1
