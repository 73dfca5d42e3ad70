from pathlib import Path

import pytest
import typer

from gemmtune.cli.models import call_factory, find_factory
from gemmtune.core.errors import GemmtuneError

SOURCE = """
from dataclasses import dataclass
import neighbour

@dataclass
class Thing:
    size: int

def factory(dtype="bf16"):
    return (lambda x: (dtype, x)), (neighbour.VALUE,)

def several():
    return print, [(1,), {"sep": ""}]

def broken():
    raise RuntimeError("no weights")

def nothing():
    return None

def leaves():
    raise SystemExit(3)

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("VALUE = 41\n")
    path = tmp_path / "user_model_for_tests.py"
    path.write_text(SOURCE)
    return path


def test_factory_file_may_import_neighbours_and_take_a_dtype(file: Path) -> None:
    model, calls = call_factory(find_factory(f"{file}:factory"), "fp32")
    assert calls == [((41,), {})]
    assert model(1) == ("fp32", 1)


def test_factory_may_return_several_calls(file: Path) -> None:
    assert call_factory(find_factory(f"{file}:several"), None)[1] == [((1,), {}), ((), {"sep": ""})]


def test_factory_is_found_by_its_dotted_module_name() -> None:
    assert find_factory("gemmtune.core.workloads:build").__name__ == "build"


@pytest.mark.parametrize("spec", ["noname", ":f", "a.py:", "/nonexistent.py:f"])
def test_malformed_specs_raise_bad_parameter(spec: str) -> None:
    with pytest.raises(typer.BadParameter):
        find_factory(spec)


def test_missing_or_uncallable_names_raise_bad_parameter(file: Path) -> None:
    for name in ("absent", "number"):
        with pytest.raises(typer.BadParameter, match="no callable"):
            find_factory(f"{file}:{name}")


def test_errors_of_the_factory_raise_gemmtune_error(file: Path, tmp_path: Path) -> None:
    with pytest.raises(GemmtuneError, match="broken raised RuntimeError: no weights"):
        call_factory(find_factory(f"{file}:broken"), None)
    with pytest.raises(GemmtuneError, match="leaves raised SystemExit: 3"):
        call_factory(find_factory(f"{file}:leaves"), None)
    with pytest.raises(GemmtuneError, match="dict must return"):  # a callable without a signature
        call_factory(find_factory("builtins:dict"), None)
    with pytest.raises(GemmtuneError, match="must return"):
        call_factory(find_factory(f"{file}:nothing"), None)
    with pytest.raises(typer.BadParameter, match="takes no dtype"):
        call_factory(find_factory(f"{file}:several"), "bf16")
    bad = tmp_path / "bad_model_for_tests.py"
    bad.write_text("1/0\n")
    with pytest.raises(GemmtuneError, match="ZeroDivisionError"):
        find_factory(f"{bad}:f")
    with pytest.raises(GemmtuneError, match="no_such_package_anywhere"):
        find_factory("no_such_package_anywhere:f")
