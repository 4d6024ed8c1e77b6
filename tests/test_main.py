"""`python -m jaxformer`: dispatch of commands."""

import pytest

from jaxformer.__main__ import COMMANDS, main


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown and what in " ".join(shown.split()) for name, (_, what) in COMMANDS.items())


def test_command_receives_its_arguments(capsys):
    assert main(["tokens", "--no-such-option"]) == 2
    assert "unknown option --no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [("verify_resume", "did you mean verify-resume?"), ("trian", "did you mean train?"), ("xyz", "there are train, ")],
)
def test_unknown_command_is_refused(name, message, capsys):
    assert main([name, "--steps", "3"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: unknown command {name}; ") and message in err and err.count("\n") == 1
