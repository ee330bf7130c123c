"""`jaxsp VERB`: the command line, its messages and exit codes. What the verbs do stands in `jaxsp.verbs`."""

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from jaxsp.command_line import make_parser
from jaxsp.config import UserError
from jaxsp.verbs import VERBS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns 0, 1 for what the user can mend, 2 for a command line or config that cannot be meant.

    130 and 141 are the shell's for Ctrl-C and for a reader that left, as `| head` does.
    """
    if sys.stderr is None:  # as `2>&-` leaves it: what is printed there would go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until Python ends
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.verb == "train" and all("=" in each and not each.startswith("-") for each in rest):
        arguments.overrides += rest  # behind an option, argparse takes no more of them itself
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if sys.stdout is None:  # as `>&-` leaves it
        print("jaxsp: standard output is closed: there is nowhere to write to", file=sys.stderr)
        return 1
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        status = VERBS[arguments.verb](arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return 141
    except KeyboardInterrupt:
        print("jaxsp: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        message, status = _explain(error)
        print(f"jaxsp: {message}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()  # perhaps it was standard output that had no space left: it would fail again at the end
        return status


def _explain(error: Exception) -> tuple[str, int]:
    """One message for an error, and the exit code."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk{f' for {error.filename}' if error.filename else ''}; free some there", 1
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; mend the name or its permissions", 1
    first_line = (str(error).strip() or "no message").splitlines()[0]
    if "RESOURCE_EXHAUSTED" in first_line:
        return f"the device is out of memory ({first_line[:200]}); choose smaller sizes or --dtype bfloat16", 1
    return f"internal error: {type(error).__name__}: {first_line}; run it with --debug for the traceback", 1


def _drop_output() -> None:
    """Lets nothing more be written to a standard output that does not take it, also not when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
