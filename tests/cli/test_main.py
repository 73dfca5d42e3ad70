"""The command as a process: quick without torch, and no traceback whatever becomes of it and its streams."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gemmtune import cli


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of sh, in which $G is the gemmtune command."""
    script = f'G="{sys.executable} -m gemmtune"; {line}'
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("args", "code"), [("--help", 0), ("--version", 0), ("tune --help", 0), ("tune --budget nan 1,2,3", 2), ("nope", 2)]
)
def test_help_and_wrong_usage_do_without_torch(args: str, code: int) -> None:
    script = (
        "import sys; from gemmtune.cli import main; sys.argv[1:] = sys.argv[1].split()\n"
        "try: main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, args], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == f"{code} False"


def test_standard_output_that_is_full_closed_or_left() -> None:
    full = shell("$G --help > /dev/full")
    assert (full.returncode, full.stderr) == (1, "error: standard output: No space left on device\n")
    closed = shell("$G --help >&-")
    assert (closed.returncode, closed.stderr) == (0, "")
    left = shell("($G --help; echo code $? >&2) | true")
    assert "Traceback" not in left.stderr
    assert "Exception ignored" not in left.stderr


def test_all_streams_closed() -> None:
    assert shell("$G --version <&- >&- 2>&-").returncode == 0


def test_every_interrupt_is_counted_and_raised() -> None:
    former = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seen = cli._record_interrupts()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert cli._record_interrupts() == []
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> object:
    """The code that main exits with when the commands raise ``error``."""

    def app(prog_name: str) -> None:
        raise error

    monkeypatch.setattr("gemmtune.cli.commands.app", app)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_how_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyboardInterrupt(), SystemExit(130)):
        assert ended(monkeypatch, error) == 1
        assert capsys.readouterr().err == "error: interrupted\n"
    assert ended(monkeypatch, SystemExit(2)) == 2
    assert ended(monkeypatch, OSError(28, "No space left on device")) == 1
    monkeypatch.setattr(cli, "_record_interrupts", lambda: [2])  # numpy makes an ImportError of Ctrl-C
    assert ended(monkeypatch, ImportError("cannot load module more than once per process")) == 1
    assert capsys.readouterr().err.endswith("error: interrupted\n")
    monkeypatch.setattr(cli, "_record_interrupts", lambda: [])
    with pytest.raises(AssertionError, match="a bug"):  # bugs keep their traceback
        ended(monkeypatch, AssertionError("a bug"))
