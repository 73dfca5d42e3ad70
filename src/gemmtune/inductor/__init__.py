"""gemmtune in ``torch.compile``: the backend, its options, and ``install()`` for ``backend="inductor"``.

``torch.compile(model, backend="gemmtune")`` has Inductor compile the graph, and gemmtune choose its products.
"""

from __future__ import annotations

from .backend import Installation, compile, explain, gemmtune_backend, install
from .graph_report import GraphReport, ProductReport

__all__ = ["GraphReport", "Installation", "ProductReport", "compile", "explain", "gemmtune_backend", "install"]
