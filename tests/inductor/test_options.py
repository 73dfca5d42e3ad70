"""Options of the backend: gemmtune's, Inductor's under PyTorch's names, and modes."""

from __future__ import annotations

from typing import Any

import pytest

from gemmtune.inductor.hooks import inductor_config
from gemmtune.inductor.options import COMBO, PDL, launch_patches, parse_options
from gemmtune.store import MemoryStore


def test_options_are_divided() -> None:
    store = MemoryStore()
    options = parse_options(
        "max-autotune",
        {"policy": "cached", "budget": 2, "store": store, "backends": ["aten"], "multi_kernel_hints": [64, 256],
         "epilogue_fusion": False, "triton.cudagraphs": False},
    )  # fmt: skip
    assert (options.policy, options.budget, options.backends) == ("cached", 2, ("aten",))
    assert options.store is store
    assert options.multi_kernel_hints == (64, 256)
    assert options.inductor["epilogue_fusion"] is False
    assert options.inductor["triton.cudagraphs"] is False
    assert "coordinate_descent_tuning" not in options.inductor, "the mode's"
    assert not options.descends
    assert parse_options("max-autotune", {"coordinate_descent_tuning": True}).descends
    assert options.inductor["max_autotune_pointwise"] is True
    assert "max_autotune" not in options.inductor


def test_default_tunes_on_a_miss() -> None:
    assert parse_options().policy == "on-miss"
    assert dict(parse_options().inductor) == {"freezing": False}


def test_launches_are_patched_unless_the_user_sets_them() -> None:
    if PDL in inductor_config.get_config_copy():
        assert launch_patches(parse_options("max-autotune")) == {PDL: True, COMBO: True}
        assert launch_patches(parse_options("max-autotune", {PDL: False})) == {COMBO: True}
    else:  # torch 2.9
        assert launch_patches(parse_options("max-autotune")) == {COMBO: True}
        with pytest.raises(ValueError, match="neither an option of gemmtune"):
            parse_options("max-autotune", {PDL: False})
    assert COMBO not in launch_patches(parse_options("max-autotune", {COMBO: False}))
    assert parse_options("max-autotune-no-cudagraphs").tunes_pointwise
    assert not parse_options("reduce-overhead").tunes_pointwise


@pytest.mark.parametrize(
    ("mode", "options", "error", "words"),
    [
        ("fast", {}, ValueError, "mode must be one of default"),
        (None, {"polcy": "off"}, ValueError, "'polcy' is neither an option of gemmtune"),
        (None, {"policy": "never"}, ValueError, "policy must be one of"),
        (None, {"budget": 0}, ValueError, "positive number of seconds"),
        (None, {"budget": True}, ValueError, "positive number of seconds"),
        (None, {"store": "x.db"}, TypeError, "must be a gemmtune store"),
        (None, {"backends": "aten"}, TypeError, "sequence of names"),
        (None, {"backends": ["atan"]}, ValueError, "atan"),
        (None, {"multi_kernel_hints": 64}, TypeError, "list of int"),
        (None, {"multi_kernel_hints": [0]}, ValueError, "positive ints"),
        (None, {"epilogue_fusion": 1}, TypeError, "must be of type bool"),
    ],
)
def test_bad_values_are_refused(mode: str | None, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parse_options(mode, options)
