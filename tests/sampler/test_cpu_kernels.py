"""The C kernels' compilation: compilers of every kind, and caches that are damaged or cannot be had."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxsp.sampler import cpu_kernels
from jaxsp.sampler.cpu_kernels import Kernels, load_kernels

PROGRAM = "from jaxsp.sampler.cpu_kernels import load_kernels; print(load_kernels())"


def start(**variables: str) -> subprocess.Popen[str]:
    """A process that prints what `load_kernels` gives it."""
    package = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(package), **variables}
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate("a line that is not for the compiler\n", timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def compiled() -> str:
    found = load_kernels()
    assert isinstance(found, Kernels), f"the kernel {found}"
    return str(found)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def kept(cache: Path) -> list[Path]:
    return list((cache / "jaxsp").iterdir())


def stranger(library: Path) -> None:
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda library: library.write_bytes(b""), id="empty"),
        pytest.param(lambda library: library.write_bytes(library.read_bytes()[:5000]), id="cut"),
        pytest.param(stranger, id="another library"),
    ],
)
def test_a_damaged_library_is_compiled_anew(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    assert answer(start(XDG_CACHE_HOME=str(tmp_path))) == compiled()
    (library,) = kept(tmp_path)
    whole = library.read_bytes()
    damage(library)
    assert answer(start(XDG_CACHE_HOME=str(tmp_path))) == compiled()
    assert kept(tmp_path) == [library]
    assert library.read_bytes() == whole


def test_processes_that_begin_together_leave_one_library(tmp_path: Path) -> None:
    processes = [start(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert [answer(process) for process in processes] == [compiled()] * 2
    assert len(kept(tmp_path)) == 1


def test_a_process_killed_while_it_compiles_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    waits = script(
        tmp_path / "cc", f'[ "$1" = --version ] && exec cc "$@"; echo > {tmp_path}/begun; cc "$@"; exec sleep 3'
    )
    process = start(XDG_CACHE_HOME=str(tmp_path), CC=waits, TMPDIR=str(tmp_path))
    while not (tmp_path / "begun").exists():
        assert process.poll() is None, process.communicate()
    process.kill()
    process.wait()
    assert not (tmp_path / "jaxsp").exists() or not kept(tmp_path)


def test_the_library_is_used_where_the_cache_has_no_place_for_it(tmp_path: Path) -> None:
    assert answer(start(XDG_CACHE_HOME=str(tmp_path))) == compiled()
    (library,) = kept(tmp_path)
    library.unlink()
    library.mkdir()
    assert answer(start(XDG_CACHE_HOME=str(tmp_path))) == compiled()
    assert kept(tmp_path) == [library]


def test_a_cache_under_a_tilde_is_in_the_home(tmp_path: Path) -> None:
    assert answer(start(XDG_CACHE_HOME="~/cache", HOME=str(tmp_path))) == compiled()
    assert len(kept(tmp_path / "cache")) == 1


def test_no_home_is_no_hindrance() -> None:
    assert answer(start(XDG_CACHE_HOME="~nobody-of-this-name/cache")) == compiled()
    assert not Path("~nobody-of-this-name").exists()


def test_the_compiler_may_be_called_with_arguments_and_through_another_program(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "wrapper", 'exec "$@"')
    assert answer(start(XDG_CACHE_HOME=str(tmp_path), CC=f"{wrapper} cc -pipe")) == compiled()


def test_a_compiler_may_warn_in_any_encoding_and_gets_none_of_our_input(tmp_path: Path) -> None:
    talks = script(tmp_path / "cc", "read line && exit 3; printf '\\377 a warning\\n' >&2; exec cc \"$@\"")
    assert answer(start(XDG_CACHE_HOME=str(tmp_path), CC=talks)) == compiled()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("printf 'x.c: error: \\377 no\\n  1 |\\n' >&2; exit 3", "x.c: error: \N{REPLACEMENT CHARACTER} no"),
        ("exit 0", "it made no library"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_error(tmp_path: Path, body: str, reason: str) -> None:
    compiler = script(tmp_path / "cc", body)
    assert answer(start(XDG_CACHE_HOME=str(tmp_path), CC=compiler)) == f"was not compiled by {compiler}: {reason}"


def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(tmp_path / "cc", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(cpu_kernels, "_LIMIT_S", 0.5)
    begun_s = time.monotonic()
    assert load_kernels.__wrapped__() == f"was not compiled by {compiler}: it was not done after 0.5 seconds"
    child = int((tmp_path / "child").read_text())
    while time.monotonic() - begun_s < 60 and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")  # nobody may have taken note of its end yet
