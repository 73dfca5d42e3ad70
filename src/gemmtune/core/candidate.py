"""Candidates: ways to solve a Problem, as data, and those that are ruled out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Scalar = str | int | float | bool
_SCALARS = (str, int, float, bool)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to solve a Problem, as data. ``config`` is sorted by name, so equal candidates have equal ids."""

    backend: str
    template: str
    config: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def make(cls, backend: str, template: str, **config: Scalar) -> Candidate:
        return cls(backend, template, tuple(sorted(config.items())))

    @property
    def id(self) -> str:
        """Stable name, e.g. ``native/gemm[isa=avx512,mr=6,nr=64]``."""
        inner = ",".join(f"{name}={value}" for name, value in self.config)
        return f"{self.backend}/{self.template}" + (f"[{inner}]" if inner else "")

    @property
    def identity(self) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
        """Backend, template and config with the type of every value.

        Two candidates are the same candidate exactly when their identities are equal. Neither ``id`` nor ``==`` tells
        that of data from outside: ``id`` prints 1 and "1" alike, and True, 1 and 1.0 compare equal.
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
        """Raises KeyError, TypeError or ValueError on anything malformed."""
        backend, template, config = data["backend"], data["template"], data["config"]
        if not (isinstance(backend, str) and isinstance(template, str) and isinstance(config, Mapping)):
            raise TypeError(f"malformed candidate: {data!r}")
        for name, value in config.items():
            if not isinstance(name, str) or not isinstance(value, _SCALARS):
                raise TypeError(f"malformed candidate config: {name!r}: {value!r}")
        return cls.make(backend, template, **config)


def is_same(value: object, other: object) -> bool:
    """Whether two config values are equal and of one type: True and 1.0 are not 1."""
    return type(value) is type(other) and value == other


@dataclass(frozen=True, slots=True)
class Illegal:
    """A candidate ruled out before it is built, and why (``gemmtune explain`` prints it)."""

    candidate: Candidate
    reason: str
