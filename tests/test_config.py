"""Configs: one file in, overrides on top, every key and type checked, and the same config out again."""

import dataclasses
import math
import operator
from pathlib import Path

import pytest

from jaxsp.config import _BOUNDS, ModelConfig, RunConfig, UsageError, dump_config, load_config

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  name: some/model\nspice:\n  num_steps: 7\n")
    return file


def fields(config_type: type) -> list[str]:
    """Dotted names of the leaves."""
    names = []
    for field in dataclasses.fields(config_type):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            names += [f"{field.name}.{name}" for name in fields(type(default))]
        else:
            names.append(field.name)
    return names


def test_what_a_file_does_not_say_is_the_default(path: Path) -> None:
    config = load_config(path)
    assert config.model == ModelConfig("some/model")
    assert config.spice.num_steps == 7
    assert dataclasses.replace(config, model=ModelConfig("x"), spice=RunConfig().spice) == RunConfig(ModelConfig("x"))


def test_overrides_go_before_the_file_and_the_last_one_wins(path: Path) -> None:
    overrides = ["spice.num_steps=3", "model.system_prompt=null", "spice.num_steps=5", "learner.learning_rate=1e-4"]
    config = load_config(path, [*overrides, "corpus.path=a=b"])
    assert (config.spice.num_steps, config.model.system_prompt, config.learner.learning_rate) == (5, None, 1e-4)
    assert config.corpus.path == "a=b"
    assert load_config(path, ["model.system_prompt=You are 5."]).model.system_prompt == "You are 5."


def test_a_dumped_config_loads_as_itself(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["model.system_prompt=null", "learner.length_normaliser=9", "seed=3"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_every_number_has_bounds_and_a_cap_may_be_infinite(path: Path) -> None:
    numbers = [name for name in fields(RunConfig) if type(operator.attrgetter(name)(RunConfig())) in (int, float)]
    without = [name for name in numbers if name not in _BOUNDS]
    assert without == ["seed", "mesh.data", "mesh.fsdp", "mesh.context", "mesh.expert", "mesh.tensor"]
    learner = load_config(path, ["learner.importance_cap=.inf", "learner.max_grad_norm=.inf"]).learner
    assert learner.importance_cap == learner.max_grad_norm == math.inf


def test_a_config_cannot_be_changed(path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(path).seed = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("spice.num_step=3", r"^override spice\.num_step=3: .*num_step.*num_steps"),
        ("spice.num_steps={", r"^override spice\.num_steps=\{ is not readable YAML"),
        ("leaner.row_tokens=3", "leaner.*learner"),
        ("spice.num_steps=many", "many"),
        ("spice.num_steps=2.5", "2.5"),
        ("spice.trains_reasoner=7.5", "7.5"),
        ("model.renderer=qwen", "qwen"),
        ("learner=3", r"learner holds fields of its own.*learner\.learning_rate.*not 3"),
        ("spice.num_steps", "not of the form a.b=c"),
        ("checkpoint.every_steps=0", r"checkpoint\.every_steps = 0 must be at least 1"),
        ("checkpoint.keep=0", r"checkpoint\.keep = 0 must be at least 1"),
        ("learner.trajectories_per_update=-1", r"learner\.trajectories_per_update = -1 must be at least 0"),
        ("spice.group_size=1", r"spice\.group_size = 1 must be at least 2"),
        ("sampler.num_slots=0", r"sampler\.num_slots = 0 must be at least 1"),
        ("spice.temperature=0", r"spice\.temperature = 0\.0 must be above 0 and finite"),
        ("spice.invalid_reward=.nan", r"spice\.invalid_reward = nan must be finite"),
        ("learner.learning_rate=-1e-6", r"learner\.learning_rate = -1e-06 must be at least 0 and finite"),
        ("learner.beta2=1", r"learner\.beta2 = 1\.0 must be at least 0 and below 1"),
        ("learner.max_grad_norm=0", r"learner\.max_grad_norm = 0\.0 must be above 0"),
        ("learner.clip_low=-0.2", r"learner\.clip_low = -0\.2 must be at least 0"),
        ("learner.importance_cap=0", r"learner\.importance_cap = 0\.0 must be above 0"),
        ("learner.kl_coef=-0.1", r"learner\.kl_coef = -0\.1 must be at least 0"),
        ("learner.objective=ppo", r"learner\.objective|ppo"),
        ("learner.importance_low=1", r"learner\.importance_low = 1\.0 must be at least 0 and below 1"),
        ("learner.importance_high=0.5", r"learner\.importance_high = 0\.5 must be at least 1"),
        ("learner.ema_decay=1", r"learner\.ema_decay = 1\.0 must be at least 0 and below 1"),
        ("learner.overlong_buffer=0", r"learner\.overlong_buffer = 0 must be at least 1"),
        ("learner.schedule_updates=0", r"learner\.schedule_updates = 0 must be at least 1"),
        ("evaluation.temperature=-1", r"evaluation\.temperature = -1\.0 must be at least 0"),
        ("verifier.timeout_s=0", r"verifier\.timeout_s = 0\.0 must be above 0"),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_named(path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_config(path, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  nam: x\n", r"^config .*run.yaml: .*nam.*name"),
        ("model:\n  name: x\nspice:\n  num_steps: [1]\n", "num_steps|List"),
        ("model: {\n", "run.yaml is not readable YAML"),
        ("- a\n", "run.yaml.*holds a list"),
        ("model: x\n", r"run.yaml: model holds fields of its own.*model\.name.*not 'x'"),
        ("model: {name: x}\nspice:\n", r"spice holds fields of its own.*spice\.num_steps.*not null"),
        ("seed: 1\n", r"model\.name is missing"),
        ("", r"model\.name is missing"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_config(tmp_path / "run.yaml")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml does not exist"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(UsageError, match=str(tmp_path)):
        load_config(tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_a_config_file_is_short_and_begins_with_its_command(file: Path) -> None:
    config = load_config(file)
    text = file.read_text()
    lines = text.splitlines()
    command = f"# jaxsp train configs/{file.relative_to(CONFIGS)}"
    assert lines[0] == command or lines[0].startswith(command + " ")
    assert len(lines) < 40
    assert "$" not in text  # no interpolation, no environment variables: one file is one run
    overrides = lines[0].removeprefix(command).split()
    assert load_config(file, overrides).method == config.method


def test_there_is_a_quickstart_and_the_number_of_knobs_is_bounded() -> None:
    assert CONFIGS / "quickstart.yaml" in FILES
    assert len(fields(RunConfig)) <= 90
