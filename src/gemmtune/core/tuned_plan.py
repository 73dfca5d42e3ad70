"""The result of tuning one weight as a function of M, as strictly typed data that msgspec stores as JSON.

A Decision holds for one M. A TunedPlan divides a range of M into intervals, each with the kernel that serves it. A plan
of batched products may be one over their batch instead (``dim``): what is called M here is then the batch.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import msgspec

from .decision import Verdict
from .problem import Dim


class PlanKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel that was timed at many M.

    candidate: ``Candidate.to_dict()``. tuned_m: the kernel is loaded for the Problem with this M. It is that of the
    Decision that the candidate comes from; without one, an M at which its backend expected it to be fast. packing: the
    layout in which the kernel takes its weight; None: unpacked. overlap: as ``LayoutDecision.overlap``. times: seconds
    per call by M, comparable between the kernels of one M, with what sustained load adds to them beyond ATen's plain op
    (``Measurements.record_load``). surcharge: a factor on its times by which older plans have
    what ``TunedPlan.surcharges`` has since. verified: the values of M at which its results were compared with the
    oracle, ascending. verdict: the result of all these comparisons; None for a kernel that was not verified, which no
    interval may name. reason: why it cannot serve at all; "" if it can.
    """

    candidate: dict[str, Any]
    id: str
    tuned_m: int
    packing: str | None = None
    overlap: bool = True
    times: dict[int, float] = {}
    verified: tuple[int, ...] = ()
    verdict: Verdict | None = None
    reason: str = ""
    surcharge: float = 1.0


class PlanInterval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The M from ``first`` to ``last``, both included, and the id of the kernel that serves them."""

    first: int
    last: int
    kernel: str


class TunedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of tuning one weight over a range of M on one Target.

    dim: the dimension whose sizes are called M here: "m" or "batch" (``core.problem.Dim``). plan_key: the key of the
    weight's Problems with it left free. problem: ``Problem.to_dict()`` of one of them. first, last: the range of M.
    tuned: the M of the Decisions. intervals: by layout ("" = unpacked), ascending and without gaps from ``first`` to
    ``last``. kernels: every kernel that was timed, ATen's among them. noise: by M, the half width of the 95% interval
    of a kernel's time there, relative to the time. bound: the regret that the choice of kernels allowed at any measured
    M (0.05: a kernel may take 5% more than the fastest timed there). counts: the calls by M that were recorded, which
    weigh more; empty when none were. seconds: the time that tuning took, without that of the Decisions. overhead_s:
    seconds that a call of a kernel costs the host beyond a call of plain PyTorch, which the times do not contain.
    surcharges: by form of the weight ("raw" or "packed") and M of a Decision, the factor on the times of gemmtune's
    kernels in the surroundings of the Decision's paired tests where they were slowest beside ATen's (between other
    kernels, with operands in the cache or not). config_key: the name of the ``config_key`` whose keys divided the
    range; "": the intervals were found by measurements. With a name, an interval is a run of M with one key, ``bound``
    does not hold, and ``tuned`` are the M that represent the keys, of those that were decided. scan: seconds per call
    of ATen's plain op by M, timed at many M without other kernels beside it (``tuning.plain_scan``); empty where no
    kernel takes about as long, and on CPUs.
    """

    plan_key: str
    problem: dict[str, Any]
    target_key: str
    first: int
    last: int
    intervals: dict[str, tuple[PlanInterval, ...]]
    kernels: tuple[PlanKernel, ...]
    noise: dict[int, float] = {}
    bound: float = 0.05
    counts: dict[int, int] = {}
    stopped: str = ""
    seconds: float = 0.0
    seed: int = 0
    created: float = 0.0
    tuned: tuple[int, ...] = ()
    overhead_s: float = 0.0
    config_key: str = ""
    surcharges: dict[str, dict[int, float]] = {}
    scan: dict[int, float] = {}
    dim: Dim = "m"

    def find(self, kernel_id: str) -> PlanKernel | None:
        """Return a kernel by its id; None when there is none."""
        return next((kernel for kernel in self.kernels if kernel.id == kernel_id), None)

    def serving(self, m: int, packing: str = "") -> PlanKernel | None:
        """Return the kernel that serves ``m`` in a layout; None outside the range, or for a layout without
        intervals."""
        intervals = self.intervals.get(packing, ())
        index = bisect_right(intervals, m, key=lambda interval: interval.first) - 1
        if index < 0 or m > intervals[index].last:
            return None
        return self.find(intervals[index].kernel)

    def regret(self, m: int, packing: str = "") -> float | None:
        """Return by how much the serving kernel's time exceeds the least time of any kernel in the same layout at a
        measured M, as a share of the latter (0.0: it is the fastest). Kernels that cannot serve do not count. None
        where nothing was measured."""
        serving = self.serving(m, packing)
        able = [kernel for kernel in self.kernels if (kernel.packing or "") == packing and not kernel.reason]
        times = [kernel.times[m] for kernel in able if m in kernel.times]
        if serving is None or m not in serving.times or not times:
            return None
        return serving.times[m] / min(times) - 1.0
