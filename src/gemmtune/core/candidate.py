"""Candidates: the ways in which a backend can solve a Problem, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Scalar = str | int | float | bool
_SCALARS = (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to solve a Problem, as plain data.

    backend: name of the backend that builds it. template: name of a kernel template of that backend. config: the
    template's parameters (name, value), sorted by name so that equal candidates have equal ids.
    """

    backend: str
    template: str
    config: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def make(cls, backend: str, template: str, **config: Scalar) -> Candidate:
        return cls(backend, template, tuple(sorted(config.items())))

    @property
    def id(self) -> str:
        """A stable name, e.g. ``native/gemm[isa=avx512,mr=6,nr=64]``."""
        inner = ",".join([f"{name}={value}" for name, value in self.config])  # faster than a generator
        return f"{self.backend}/{self.template}" + (f"[{inner}]" if inner else "")

    @property
    def identity(self) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
        """The backend, the template, and the config with the type of every value.

        Two candidates are identical exactly when their identities are equal. For data from a file, neither ``id`` nor
        ``==`` is sufficient: ``id`` prints 1 and "1" alike, and True, 1 and 1.0 compare equal.
        """
        typed = tuple((name, type(value).__name__, repr(value)) for name, value in self.config)
        return self.backend, self.template, typed

    def __getitem__(self, name: str) -> Scalar:
        for key, value in self.config:
            if key == name:
                return value
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "template": self.template, "config": dict(self.config)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Candidate:
        """Build a Candidate from ``to_dict``'s data. Raises KeyError, TypeError or ValueError for malformed data."""
        backend, template, config = data["backend"], data["template"], data["config"]
        if not (isinstance(backend, str) and isinstance(template, str) and isinstance(config, Mapping)):
            raise TypeError(f"malformed candidate: {data!r}")
        for name, value in config.items():
            if not isinstance(name, str) or not isinstance(value, _SCALARS):
                raise TypeError(f"malformed candidate config: {name!r}: {value!r}")
        return cls(backend, template, tuple(sorted(config.items())))


def is_same(value: object, other: object) -> bool:
    """Whether two config values have equal types and values: neither True nor 1.0 is the same as 1."""
    return type(value) is type(other) and value == other


class Illegal(NamedTuple):
    """A candidate that cannot be built for a Problem, and the reason, which ``gemmtune explain`` prints."""

    candidate: Candidate
    reason: str
