"""What the tests of whole runs share: a cache of compiled programs, and a run that teaches a tiny model the game."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxsp.cli import main
from jaxsp.inference import export_run
from tests.integration.tiny_spice import TEACHING_STEPS, write_game
from tests.tiny import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs are compiled once for all runs of these tests, also those in other processes."""
    directory = str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run from a random model: the warm start teaches the game, four steps of self-play follow."""
    directory = tmp_path_factory.mktemp("first")
    config = write_game(directory, write_tiny_model(directory / "model"))
    assert main(["train", str(config), "checkpoint.keep=100"]) == 0
    (run_dir,) = (directory / "runs").iterdir()
    return run_dir


@pytest.fixture(scope="session")
def game(first_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run that starts from a model which knows the game."""
    directory = tmp_path_factory.mktemp("game")
    export_run(first_run, directory / "model", TEACHING_STEPS, "float32")
    return write_game(directory, directory / "model")
