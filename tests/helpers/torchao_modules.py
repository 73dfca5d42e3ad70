"""Arguments of ``pytest.importorskip`` for torchao: ``reason=REASON, exc_type=SKIPPED``.

torchao 0.18 imports ``torch.nn.functional.ScalingType``, which torch 2.9 does not have.
"""

from __future__ import annotations

import torch

_IS_NEW_ENOUGH = hasattr(torch.nn.functional, "ScalingType")

SKIPPED: type[ImportError] = ModuleNotFoundError if _IS_NEW_ENOUGH else ImportError
REASON = (
    "pip install torchao"
    if _IS_NEW_ENOUGH
    else "torchao needs torch.nn.functional.ScalingType, which this torch does not have"
)
