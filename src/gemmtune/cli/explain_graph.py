"""``gemmtune explain --graph file.py:factory``: what the backend of torch.compile makes of a model's products."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..core.errors import GemmtuneError
from .common import checked_store, plain_console, print_json, quiet_stdout
from .models import call_factory, find_factory


def explain_graph(spec: str, dtype: str | None, store_path: Path | None, *, as_json: bool) -> None:
    """Print a line for each product of the graphs of a model's example calls.

    spec, dtype: as for ``models.find_factory`` and ``call_factory``. Raises GemmtuneError where the model or its
    compilation raises.
    """
    with quiet_stdout(as_json):
        model, calls = call_factory(find_factory(spec), dtype)
        import torch

        from ..dispatch.runtime import RUNTIME
        from ..inductor import explain

        if isinstance(model, torch.nn.Module):
            model.eval()
        reports = []
        try:
            with checked_store(store_path) as store:
                for args, kwargs in calls:
                    reports += explain(model, *args, options={"store": store}, **kwargs)
        except GemmtuneError:
            raise
        except Exception as error:  # the user's forward, and compiling it, may raise anything at all
            raise GemmtuneError(f"compiling {spec} raised {type(error).__name__}: {error}") from error
        finally:
            RUNTIME.refresh()  # the store is closed
    if as_json:
        graphs: list[dict[str, Any]] = [dataclasses.asdict(report) for report in reports]
        print_json({"graphs": graphs})
        return
    out = plain_console()
    for report in reports:
        out.print(report.summary, style="bold", soft_wrap=True)
        for line in report.lines():
            out.print(f"  {line}", soft_wrap=True)
