from pathlib import Path

from helpers.command import Run


def test_writes_one_file_from_the_store(run: Run, filled: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    result = run("report", "-o", output, "--store", filled, "--json")
    assert result.code == 0
    assert result.json == {"path": str(output), "decisions": 3}
    assert "16x4096x4096 bf16" in output.read_text()


def test_all_machines(run: Run, filled: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    assert run("report", "-o", output, "--all-machines", "--store", filled, "--json").json["decisions"] == 4
    assert "Another CPU, 64 threads" in output.read_text()


def test_an_empty_store_is_a_failure_that_says_what_to_do(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    result = run("report", "-o", output, "--store", tmp_path / "none.db")
    assert result.code == 1
    assert "tune something first" in result.err
    assert not output.exists()
