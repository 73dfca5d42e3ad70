"""gemmtune in ``torch.compile``: the backend, its options, and ``install()`` for ``backend="inductor"``.

``torch.compile(model, backend="gemmtune")`` has Inductor compile the graph, and gemmtune choose its products.
"""

from __future__ import annotations

from .backend import Installation, compile, gemmtune_backend, install

__all__ = ["Installation", "compile", "gemmtune_backend", "install"]
