"""The names of the dispatch policies."""

from __future__ import annotations

from typing import Literal

Policy = Literal["cached", "on-miss", "off"]
