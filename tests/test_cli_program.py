"""The command line as a process of its own: what it imports, its streams, its exit code, its cache."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

RUN_MAIN = "import sys; from jaxsp.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


def write_responses(path: Path, count: int) -> Path:
    """Right answers, a line each."""
    path.write_text((json.dumps({"reference": "A", "response": r"\boxed{A}"}) + "\n") * count)
    return path


def run_program(*arguments: str | Path, program: str = RUN_MAIN, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_and_mistakes_answer_without_jax() -> None:
    program = """
import sys
from jaxsp.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not {"jax", "flax", "numpy", "rich", "tokenizers"} & set(sys.modules), "too much was imported"
    sys.exit(end.code)
"""
    for arguments, status in ((["--help"], 0), (["sample", "--help"], 0), (["--version"], 0), (["sample"], 2)):
        result = run_program(*arguments, program=program)
        assert result.returncode == status, result.stderr
    assert "usage: jaxsp" in run_program("--help").stdout
    assert run_program("--version").stdout.startswith("jaxsp 0.")


def test_the_program_exits_with_the_verbs_status(tmp_path: Path) -> None:
    result = run_program("verify", "--kind", "text", "--input", tmp_path / "absent.jsonl")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"jaxsp: --input {tmp_path / 'absent.jsonl'} cannot be read: No such file or directory\n"


def test_a_reader_that_leaves_ends_the_program_quietly(tmp_path: Path) -> None:
    file = write_responses(tmp_path / "in.jsonl", 20_000)
    command = [sys.executable, "-c", RUN_MAIN, "verify", "--kind", "choice", "--input", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["correct"]
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_a_closed_standard_output_is_one_line() -> None:
    shell = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(RUN_MAIN)} verify --kind text --input absent >&-"
    result = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr == "jaxsp: standard output is closed: there is nowhere to write to\n"


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    file = write_responses(tmp_path / "in.jsonl", 1)
    command = [sys.executable, "-c", RUN_MAIN, "verify", "--kind", "choice", "--input", str(file)]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "jaxsp: no space left on the disk; free some there\n")


@pytest.mark.parametrize("home", ["{tmp}", "/proc/nowhere"])
def test_compiled_programs_are_kept_unless_the_home_cannot_be_written(tmp_path: Path, home: str) -> None:
    program = """
import os
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ.pop("XDG_CACHE_HOME", None)
import jax
from jaxsp.verbs import _set_up_jax
_set_up_jax()
print(jax.config.jax_compilation_cache_dir)
jax.jit(lambda x: x + 1)(1)
"""
    result = run_program(program=program, HOME=home.format(tmp=tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (str(tmp_path / ".cache" / "jaxsp" / "jax") if home == "{tmp}" else "None")
