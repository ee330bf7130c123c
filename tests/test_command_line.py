"""The help that a verb prints."""

import pytest

from jaxsp.command_line import make_parser


@pytest.mark.parametrize("verb", ["eval", "sample", "chat", "serve", "score", "verify", "export"])
def test_help_states_every_default(verb: str) -> None:
    parser = make_parser()
    subparsers = next(action for action in parser._actions if action.dest == "verb")
    assert isinstance(subparsers.choices, dict)
    for action in subparsers.choices[verb]._actions:
        if action.option_strings and action.default not in (None, False, [], "==SUPPRESS=="):
            assert "default" in (action.help or ""), action.dest
        if action.option_strings and not action.option_strings[0].endswith("--prompt"):
            assert action.help, action.dest
