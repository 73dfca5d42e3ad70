"""The options of ``torch.compile(model, backend="gemmtune", options=..., mode=...)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from ..dispatch.policies import Policy
from ..store.base import Store
from .hooks import inductor_config, mode_options

# Options of Inductor.
PDL, COMBO, DESCENT = "triton.enable_pdl", "combo_kernels", "coordinate_descent_tuning"

_OURS = ("policy", "budget", "store", "backends", "multi_kernel_hints")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the backend was asked for.

    policy: ``on-miss`` tunes the Problems of a graph that the store has no decision for while it compiles; ``cached``
    uses what was tuned; ``off`` leaves every product to Inductor. budget: seconds per Problem, as for
    ``gemmtune.tune``. store: where decisions are; None: the user's. backends: names of gemmtune's backends to try.
    multi_kernel_hints: the M that are tuned where a graph's M is dynamic; empty: a range of M. inductor: patches of
    Inductor's configuration.
    """

    policy: Policy = "on-miss"
    budget: float | None = None
    store: Store | None = None
    backends: tuple[str, ...] | None = None
    multi_kernel_hints: tuple[int, ...] = ()
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tunes_pointwise(self) -> bool:
        """Whether Inductor's own kernels are tuned: in the modes of ``torch.compile`` with max-autotune."""
        return bool(self.inductor.get("max_autotune_pointwise"))

    @property
    def descends(self) -> bool:
        """Whether Inductor searches for its kernels' configurations by coordinate descent."""
        return bool(self.inductor.get(DESCENT, getattr(inductor_config, DESCENT)))

    @property
    def emulates_casts(self) -> bool:
        """Whether fused operations round where eager PyTorch rounds."""
        return bool(self.inductor.get("emulate_precision_casts", inductor_config.emulate_precision_casts))


def parse_options(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
    """Return the Options of ``torch.compile``'s arguments.

    mode: one of PyTorch's. options: gemmtune's own (the fields of Options) and Inductor's, under PyTorch's names.
    Raises ValueError for an unknown mode or option, and TypeError or ValueError for a bad value.
    """
    remaining = dict(options or {})
    ours = {name: remaining.pop(name) for name in _OURS if name in remaining}
    # Freezing would pack the weights for oneDNN before gemmtune sees the products.
    patches = {"freezing": False, **_mode_patches(mode), **_inductor_patches(remaining)}
    policy = ours.get("policy", "on-miss")
    if policy not in get_args(Policy):
        raise ValueError(f"options: policy must be one of {', '.join(get_args(Policy))}; got {policy!r}")
    budget = ours.get("budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise ValueError(f"options: budget must be a positive number of seconds per problem; got {budget!r}")
    names = ours.get("backends")
    if isinstance(names, str):
        raise TypeError(f"options: backends must be a sequence of names; got the string {names!r}")
    if names is not None:
        from .. import backends

        names = tuple(names)
        for name in names:
            backends.get(name)
    store = ours.get("store")
    if store is not None and not isinstance(store, Store):
        raise TypeError(
            f"options: store must be a gemmtune store (gemmtune.store.open_store); got {type(store).__name__}"
        )
    return Options(policy, budget, store, names, _hints(ours.get("multi_kernel_hints", ())), patches)


def launch_patches(options: Options) -> dict[str, Any]:
    """Return the patches that make the launches between products take less time on a GPU, without those that the user
    set or that this version of PyTorch lacks.

    A step of a decoder has some eight small kernels between its products, most of whose time is that of a launch.
    ``combo_kernels`` makes one kernel of independent ones. With ``triton.enable_pdl`` a kernel may begin before the one
    in front of it has ended (programmatic dependent launch). benchmarks/e2e_gpu.py measures both.
    """
    config = inductor_config.get_config_copy()
    return {name: True for name in (PDL, COMBO) if name in config and name not in options.inductor}


def _mode_patches(mode: str | None) -> dict[str, Any]:
    """Return a mode's patches. gemmtune chooses the products, so that Inductor's autotuning is for other kernels.

    Without the mode's coordinate descent, which builds some seven configurations of each kernel, one after the other:
    30 s for a decoder's twelve kernels. benchmarks/e2e_gpu.py measures what it gains ("gemmtune-descent").
    """
    modes = mode_options()
    if mode is not None and mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}; got {mode!r}")
    patches = dict(modes[mode]) if mode is not None else {}
    if patches.pop("max_autotune", False):
        patches["max_autotune_pointwise"] = True
    patches.pop(DESCENT, None)
    return patches


def _inductor_patches(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's options, with underscores for dashes. Raises ValueError for an unknown one."""
    config = inductor_config.get_config_copy()
    patches = {}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in config:
            ours = ", ".join(_OURS)
            raise ValueError(
                f"options: {key!r} is neither an option of gemmtune ({ours}) nor one of Inductor; "
                "torch._inductor.list_options() lists those"
            )
        if type(config[name]) in (bool, int, float, str) and type(value) is not type(config[name]):
            expected = type(config[name]).__name__
            raise TypeError(f"options: {key!r} must be of type {expected}; got {type(value).__name__}")
        patches[name] = value
    return patches


def _hints(hints: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(hints)
    except TypeError:
        raise TypeError(f"options: multi_kernel_hints must be a list of int; got {hints!r}") from None
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"options: multi_kernel_hints must be positive ints; got {hints!r}")
    return sizes
