from pathlib import Path

from helpers.command import CommandRunner


def test_report_writes_one_file_from_the_store(run: CommandRunner, store_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    result = run("report", "-o", output, "--store", store_path, "--json")
    assert result.code == 0
    assert result.json == {"path": str(output), "decisions": 3}
    assert "16x4096x4096 bf16" in output.read_text()


def test_all_machines_includes_other_machines(run: CommandRunner, store_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    assert run("report", "-o", output, "--all-machines", "--store", store_path, "--json").json["decisions"] == 4
    assert "Another CPU, 64 threads" in output.read_text()


def test_empty_store_is_an_error_that_suggests_tuning(run: CommandRunner, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    result = run("report", "-o", output, "--store", tmp_path / "none.db")
    assert result.code == 1
    assert "tune something first" in result.err
    assert not output.exists()
