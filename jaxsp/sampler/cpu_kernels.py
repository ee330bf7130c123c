"""The C kernels for CPUs (`cpu/*.c`): compiled for this machine's processor at first use, and made known to XLA.

The library is kept in `$XDG_CACHE_HOME/jaxsp`, else `~/.cache/jaxsp`, under a name of all that it was made of, so that
another processor, compiler, jaxlib or source gets its own.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version

PRODUCTS, ATTENTION = "jaxsp_cpu_products", "jaxsp_cpu_attention"
"""XLA's names of the kernels, which are their names in C too."""
_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC")
_LIMIT_S = 120
"""For a compiler, which takes a second on a machine that is not busy."""
_SEAL_BYTES = hashlib.sha256().digest_size


class Kernels(NamedTuple):
    """What the compiled kernels ask of their callers."""

    panel: int
    """Columns of a panel of weights."""
    lanes: int
    """Of which a head's size must be a multiple."""


@functools.cache
def load_kernels() -> Kernels | str:
    """The kernels, compiled if need be and known to XLA from here on; or why they cannot be, as what stands after
    "the kernel"."""
    commands = [words] if (words := os.environ.get("CC", "").split()) else [["cc"], ["gcc"], ["clang"]]
    command = next(([path, *rest] for first, *rest in commands if (path := shutil.which(first))), None)
    if command is None:
        names = " or ".join(first for first, *_ in commands)
        return f"needs a C compiler, and PATH has no {names} (the variable CC names another)"
    try:
        library = _library(command)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        errors = [line for line in said if "error" in line] or said[-1:]
        return f"was not compiled by {command[0]}: {errors[0] if errors else f'exit code {error.returncode}'}"
    except OSError as error:
        return f"was not compiled by {command[0]}: {error}"
    for name in (PRODUCTS, ATTENTION):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return Kernels(panel=int(library.jaxsp_cpu_panel()), lanes=int(library.jaxsp_cpu_lanes()))


def kernel_call(name: str, shapes: Sequence[jax.ShapeDtypeStruct | jax.Array], **options: Any) -> Callable[..., Any]:
    """`jax.ffi.ffi_call` of a kernel, which is made known to XLA before. ValueError where there is none."""
    kernels = load_kernels()
    if isinstance(kernels, str):
        raise ValueError(f"{name} {kernels}")
    return jax.ffi.ffi_call(name, shapes, **options)


def _library(command: list[str]) -> ctypes.CDLL:
    """The library as it is kept, else as `command` compiles it, which is kept where that can be."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    texts = [path.read_text() for path in sources]
    version = _output([*command, "--version"])
    made_of = repr((texts, command, version, _FLAGS, jaxlib.version.__version__, _processor()))
    name = f"cpu-kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    # No home, a damaged file, a disk that is full or that nothing may be run from: all are as good as no cache.
    unusable = contextlib.suppress(OSError, RuntimeError)
    with unusable:
        return _load(_cache() / name)
    with tempfile.TemporaryDirectory(prefix="jaxsp-") as scratch:  # what is loaded stays loaded
        fresh = Path(scratch) / name
        files = [str(path) for path in sources if path.suffix == ".c"]
        _output([*command, *_FLAGS, "-I", jax.ffi.include_dir(), *files, "-o", str(fresh)])
        if not fresh.exists():
            raise OSError("it made no library")
        sealed = fresh.read_bytes()
        sealed += hashlib.sha256(sealed).digest()
        with unusable:
            _keep(sealed, _cache() / name)
            return _load(_cache() / name)
        return ctypes.CDLL(str(fresh))


def _cache() -> Path:
    """Raises RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxsp").expanduser()


def _keep(content: bytes, path: Path) -> None:
    """Writes the file so that it is never there in part: of processes that begin together, the last one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    """Raises OSError unless the file ends with the SHA-256 of what is before: a cut library could kill the process."""
    content = path.read_bytes()
    if hashlib.sha256(content[:-_SEAL_BYTES]).digest() != content[-_SEAL_BYTES:]:
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _output(command: list[str]) -> str:
    """What a compiler prints; it gets no input, which may be a chat's. Raises OSError if it takes too long."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=_LIMIT_S)
        except BaseException as error:  # also Ctrl-C, which a group of its own does not hear
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"it was not done after {_LIMIT_S} seconds") from error
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return out


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))
