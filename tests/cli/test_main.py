"""The ``gemmtune`` process: no import of torch for help, and no traceback for interrupts and closed streams."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gemmtune import cli


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh in which $G is the gemmtune command."""
    script = f'G="{sys.executable} -m gemmtune"; {line}'
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("args", "code"), [("--help", 0), ("--version", 0), ("tune --help", 0), ("tune --budget nan 1,2,3", 2), ("nope", 2)]
)
def test_help_and_wrong_usage_do_not_import_torch(args: str, code: int) -> None:
    script = (
        "import sys; from gemmtune.cli import main; sys.argv[1:] = sys.argv[1].split()\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", script, args], capture_output=True, text=True)
    assert process.stderr.splitlines()[-1] == f"{code} False"


def test_full_closed_or_abandoned_standard_output_prints_no_traceback() -> None:
    full = shell("$G --help > /dev/full")
    assert (full.returncode, full.stderr) == (1, "error: standard output: No space left on device\n")
    closed = shell("$G --help >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    abandoned = shell("($G --help; echo code $? >&2) | true")
    assert "Traceback" not in abandoned.stderr
    assert "Exception ignored" not in abandoned.stderr


def test_closed_standard_streams_do_not_fail() -> None:
    assert shell("$G --version <&- >&- 2>&-").returncode == 0


def test_interrupts_are_recorded_and_raised() -> None:
    original = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals = cli._record_interrupts()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert cli._record_interrupts() == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, original)


def exit_code(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """Return the exit code of main when the commands raise ``error``."""

    def app(prog_name: str) -> None:
        raise error

    monkeypatch.setattr("gemmtune.cli.commands.app", app)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_main_maps_exceptions_to_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (KeyboardInterrupt(), SystemExit(130)):
        assert exit_code(monkeypatch, error) == 1
        assert capsys.readouterr().err == "error: interrupted\n"
    assert exit_code(monkeypatch, SystemExit(2)) == 2
    assert exit_code(monkeypatch, OSError(28, "No space left on device")) == 1
    monkeypatch.setattr(cli, "_record_interrupts", lambda: [2])  # numpy turns Ctrl-C into an ImportError
    assert exit_code(monkeypatch, ImportError("cannot load module more than once per process")) == 1
    assert capsys.readouterr().err.endswith("error: interrupted\n")
    monkeypatch.setattr(cli, "_record_interrupts", lambda: [])
    with pytest.raises(AssertionError, match="a bug"):  # bugs keep their traceback
        exit_code(monkeypatch, AssertionError("a bug"))
