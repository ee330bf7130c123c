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
    own, *options = os.environ.get("CC", "").split() or [""]  # "ccache gcc", "clang --sysroot=..."
    names = [own] if own else ["cc", "gcc", "clang"]
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        return f"needs a C compiler, and PATH has no {' or '.join(names)} (the variable CC names another)"
    try:
        library = _library([compiler, *options])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        return f"was not compiled by {compiler}: {said[-1] if said else f'exit code {error.returncode}'}"
    except OSError as error:
        return f"was not compiled by {compiler}: {error}"
    for name in (PRODUCTS, ATTENTION):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return Kernels(panel=int(library.jaxsp_cpu_panel()), lanes=int(library.jaxsp_cpu_lanes()))


def kernel_call(name: str, shapes: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """`jax.ffi.ffi_call` of a kernel, which is made known to XLA before. ValueError where there is none."""
    kernels = load_kernels()
    if isinstance(kernels, str):
        raise ValueError(f"{name} {kernels}")
    return jax.ffi.ffi_call(name, shapes, **options)


def _library(compiler: Sequence[str]) -> ctypes.CDLL:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxsp")
    with contextlib.suppress(OSError, RuntimeError):  # no home, or none that can be written
        directory = directory.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
    if os.access(directory, os.W_OK | os.X_OK):
        return ctypes.CDLL(str(_compiled(compiler, directory)))
    with tempfile.TemporaryDirectory(prefix="jaxsp-") as scratch:  # what is loaded stays loaded
        return ctypes.CDLL(str(_compiled(compiler, Path(scratch))))


def _compiled(compiler: Sequence[str], directory: Path) -> Path:
    """The library's file, made if there is none yet."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, text=True).stdout
    texts = [path.read_text() for path in sources]
    made_of = repr((texts, version, compiler[1:], _FLAGS, jaxlib.version.__version__, _processor()))
    library = directory / f"cpu-kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        # Processes that begin together each compile, and the last one's takes the place of the others', whole.
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            fresh = Path(scratch) / library.name
            files = [str(path) for path in sources if path.suffix == ".c"]
            command = [*compiler, *_FLAGS, "-I", jax.ffi.include_dir(), *files, "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            fresh.replace(library)
    return library


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))
