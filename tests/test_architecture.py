"""Promises about the package as a whole: what README says of it, what an import does, how large a file is."""

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

from jaxsp.config import load_config
from jaxsp.model.rope import rotate

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxsp"
README = (ROOT / "README.md").read_text()
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def files_in_tree() -> list[str]:
    """The files and folders that README's tree of `jaxsp/` names, those in the text behind a folder included."""
    block = README.split("```\njaxsp/\n")[1].split("```")[0]
    names = []
    for line in block.splitlines():
        if not line.startswith("  "):  # beside the package: configs/ and so on
            continue
        entry, _, text = line.strip().partition(" ")
        names.append(entry)
        if entry.endswith("/"):
            names += [entry + name for name in re.findall(r"\b\w+\.py\b", text)]
    return names


def test_the_tree_in_the_readme_names_every_module_and_nothing_else() -> None:
    names = files_in_tree()
    assert len(set(names)) == len(names)
    assert [name for name in names if not (PACKAGE / name).exists()] == []
    modules = {path.relative_to(PACKAGE).as_posix() for path in MODULES}
    assert modules - set(names) == set()


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in [*MODULES, *Path(__file__).parent.rglob("*.py")]}
    assert {str(path): length for path, length in lengths.items() if length > 450} == {}


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300
    )


HOST_SIDE = ["jaxsp.cli", "jaxsp.rollout.collect", "jaxsp.verifiers.verify", "jaxsp.envs.documents", "jaxsp.chat",
             "jaxsp.task_pool", "jaxsp.tokenizer", "jaxsp.trajectory", "jaxsp.rollout.conversations"]  # fmt: skip


def test_the_host_side_imports_no_jax() -> None:
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not {"jax", "jaxlib", "flax", "torch"} & set(sys.modules), name
"""
    done = run_python(program, *HOST_SIDE)
    assert done.returncode == 0, done.stderr


def test_importing_everything_touches_neither_devices_nor_the_environment() -> None:
    program = """
import importlib, os, sys, threading
before = dict(os.environ)
import jax
settings = dict(jax.config.values)
for name in sys.argv[1:]:
    importlib.import_module(name)
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
changed = {name for name in os.environ if os.environ[name] != before.get(name)}
assert not {name for name in changed if name.startswith(("JAX", "XLA", "OMP"))}, changed
changed = {name for name, value in jax.config.values.items() if settings.get(name, value) != value}
assert not changed, changed
assert [thread.name for thread in threading.enumerate() if not thread.daemon] == ["MainThread"]
"""
    done = run_python(program, *map(module_name, MODULES))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_describes_a_run_that_can_be_meant(path: Path) -> None:
    """What `jaxsp train CONFIG --dry-run` looks at without a network: fields, rules of play, corpus, questions."""
    from jaxsp.envs.documents import open_corpus
    from jaxsp.evaluate import read_questions
    from jaxsp.methods.spice import spice_rules
    from jaxsp.rollout.conversations import read_conversations
    from jaxsp.rollout.prompts import PROMPTS

    def count(text: str) -> range:
        return range(len(text.split()))

    config = load_config(path)
    rules = spice_rules(config.spice)
    assert config.spice.prompts in PROMPTS
    assert config.learner.row_tokens >= config.corpus.max_segment_tokens
    longest = max(rules.challenger.max_tokens, rules.reasoner.max_tokens)
    assert config.sampler.max_context > longest and config.learner.row_tokens > longest
    if config.corpus.path.startswith("embedded"):
        limit = config.corpus.max_segment_tokens
        assert open_corpus(config.corpus.path, seed=0, max_segment_tokens=limit, encode=count).num_documents > 0
    if config.evaluation.questions is not None:
        assert read_questions(config.evaluation.questions)
    if config.warm_start.conversations is not None:
        assert read_conversations(config.warm_start.conversations)


def test_array_annotations_are_checked_in_tests() -> None:
    """Pyproject names the modules for `--jaxtyping-packages`."""
    x, half = jnp.zeros((1, 3, 2, 8)), jnp.zeros((1, 3, 1, 4))
    assert rotate(x, half, half).shape == x.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        rotate(x, half, jnp.zeros((1, 2, 1, 4)))


def test_the_readme_has_every_verb() -> None:
    from jaxsp.command_line import make_parser

    (verbs,) = (action for action in make_parser()._actions if hasattr(action, "choices") and action.choices)
    assert set(verbs.choices or ()) == {
        "train",
        "eval",
        "sample",
        "chat",
        "serve",
        "score",
        "verify",
        "export",
        "report",
    }
    for verb in verbs.choices or ():
        assert f"`jaxsp {verb} " in README


def test_the_package_says_nothing_of_where_it_was_made() -> None:
    """No path of a machine and no name of a package index in what is shipped."""
    pattern = re.compile(r"/home/|/root/|/work/|/tmp/|https?://[\w.-]*pypi", re.IGNORECASE)
    files = [path for path in ROOT.glob("*") if path.suffix in (".md", ".toml") or path.name == "Makefile"]
    for path in [*files, *PACKAGE.rglob("*.py"), *(ROOT / "configs").rglob("*.yaml"), *(ROOT / "launch").iterdir()]:
        assert not pattern.search(path.read_text()), path
