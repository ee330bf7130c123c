import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from model_forward import GOLDEN
from safetensors.numpy import load_file, save_file

from jaxsp.config import UserError
from jaxsp.model.decoder import abstract_params
from jaxsp.model.hf_weights import export_hf, load_hf_params
from jaxsp.model.source import load_params, open_model

NAMES = (
    "qwen3_tied", "qwen3_untied", "llama3_scaled", "llama_bias", "qwen3_score", "qwen3_moe", "qwen3_moe_mixed",
)  # fmt: skip


def load(directory, **options):
    source = open_model(str(directory))
    return load_params(source, **options)


def assert_trees_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture
def copy_of(tmp_path):
    """A golden model's directory to spoil, its tensors passed through `change`."""

    def make(name, change=lambda tensors: tensors):
        directory = shutil.copytree(GOLDEN / name, tmp_path / name)
        save_file(change(load_file(directory / "model.safetensors")), directory / "model.safetensors")
        return directory

    return make


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
def test_export_writes_the_very_tensors_and_attributes_that_were_loaded(name, max_shard_bytes, tmp_path):
    source = open_model(str(GOLDEN / name))
    params = load_params(source)
    export_hf(
        params, source.sizes, source.config, tmp_path / "out", tokenizer_from=GOLDEN / name,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 2**30)
    found = {tensor: array for file in files for tensor, array in load_file(file).items()}
    expected = load_file(GOLDEN / name / "model.safetensors")
    assert found.keys() == expected.keys()
    for tensor, array in expected.items():
        assert found[tensor].dtype == array.dtype and found[tensor].tobytes() == array.tobytes(), tensor
    original = json.loads((GOLDEN / name / "config.json").read_text())
    assert json.loads((tmp_path / "out/config.json").read_text()) == original
    assert open_model(str(tmp_path / "out")).eos_ids == source.eos_ids
    assert_trees_equal(load(tmp_path / "out"), params)


def test_export_in_bfloat16_rounds_and_names_its_dtype(tmp_path):
    source = open_model(str(GOLDEN / "qwen3_tied"))
    params = load_params(source)
    export_hf(params, source.sizes, source.config, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {array.dtype for array in tensors.values()} == {np.dtype(bfloat16)}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and source.config["dtype"] == "float32"
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"eos_token_id": 1, "pad_token_id": 0}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert_trees_equal(load(tmp_path / "out", dtype=jnp.bfloat16), rounded)
    assert_trees_equal(load(tmp_path / "out"), jax.tree.map(lambda x: x.astype(jnp.float32), rounded))


def test_exported_files_can_be_read_by_whoever_can_read_the_config(tmp_path):
    source = open_model(str(GOLDEN / "qwen3_tied"))
    export_hf(load_params(source), source.sizes, source.config, tmp_path / "out")
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_export_copies_the_tokenizer(tmp_path):
    source = open_model(str(GOLDEN / "qwen3_tied"))
    origin = tmp_path / "origin"
    origin.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (origin / name).write_text(f'{{"eos_token_id": 7, "from": "{name}"}}')
    export_hf(load_params(source), source.sizes, source.config, tmp_path / "out", tokenizer_from=origin)
    for path in origin.iterdir():
        assert (tmp_path / "out" / path.name).read_text() == path.read_text()
    assert open_model(str(tmp_path / "out")).eos_ids == (1, 7)


def test_export_never_overwrites_and_leaves_nothing_half_done(tmp_path):
    source = open_model(str(GOLDEN / "qwen3_tied"))
    params = load_params(source)
    (tmp_path / "out").mkdir()
    (tmp_path / "out.part").mkdir()  # as an interrupted export leaves it
    (tmp_path / "out.part/model.safetensors").write_text("half")
    export_hf(params, source.sizes, source.config, tmp_path / "out")
    assert not (tmp_path / "out.part").exists()
    assert_trees_equal(load(tmp_path / "out"), params)
    with pytest.raises(UserError, match="out: exists and is not an empty directory"):
        export_hf(params, source.sizes, source.config, tmp_path / "out")
    with pytest.raises(ValueError, match="does not describe"):
        export_hf(params, source.sizes, source.config | {"num_hidden_layers": 3}, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_export_to_a_full_disk_is_one_message_and_no_half_model(tmp_path):
    script = f"""
import resource
from pathlib import Path
from jaxsp.config import UserError
from jaxsp.model.hf_weights import export_hf
from jaxsp.model.source import load_params, open_model
source = open_model({str(GOLDEN / "qwen3_tied")!r})
params = load_params(source)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # no file may grow past this, as on a full disk
try:
    export_hf(params, source.sizes, source.config, Path({str(tmp_path / "out")!r}))
except UserError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path / 'out'}: cannot write the model" in found and "free space" in found
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_files_are_read_as_bfloat16(copy_of):
    directory = copy_of("qwen3_tied", lambda t: {name: array.astype(bfloat16) for name, array in t.items()})
    table = load_file(GOLDEN / "qwen3_tied/model.safetensors")["model.embed_tokens.weight"]
    assert_trees_equal(load(directory)["embed"], table.astype(bfloat16).astype(np.float32))
    assert load(directory, dtype=jnp.bfloat16)["embed"].dtype == jnp.bfloat16


def test_kernels_are_transposed_with_heads_split():
    tensors = load_file(GOLDEN / "qwen3_untied/model.safetensors")
    layers = load(GOLDEN / "qwen3_untied")["layers"]
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    o = tensors["model.layers.1.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(layers["q"]["kernel"][1, :, 2], q[24:36].T)
    np.testing.assert_array_equal(layers["o"]["kernel"][1, 2], o[:, 24:36].T)


def test_a_tied_head_that_equals_the_embeddings_is_accepted_and_another_is_refused(copy_of):
    table = "model.embed_tokens.weight"
    directory = copy_of("qwen3_tied", lambda t: {**t, "lm_head.weight": t[table].copy()})
    assert "lm_head" not in load(directory)
    shutil.rmtree(directory)
    directory = copy_of("qwen3_tied", lambda t: {**t, "lm_head.weight": t[table] + 1})
    with pytest.raises(
        UserError, match=r"model\.safetensors: lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load(directory)


def without(name):
    return lambda tensors: {key: array for key, array in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("qwen3_untied", without("lm_head.weight"), "lm_head.weight [64, 32] is missing"),
        ("qwen3_score", without("score.weight"), "score.weight [3, 32] is missing"),
        (
            "llama_bias",
            without("model.layers.1.self_attn.q_proj.bias"),
            "model.layers.1.self_attn.q_proj.bias [32] is missing",
        ),
        ("qwen3_tied", lambda t: {**t, "model.layers.2.x": np.zeros(3, np.float32)}, "model.layers.2.x [3] belongs to"),
        (
            "qwen3_tied",
            lambda t: {**t, "model.norm.weight": np.zeros(3, np.float32)},
            "model.norm.weight has shape [3], the config asks for [32]",
        ),
        (
            "qwen3_tied",
            lambda t: {**t, "model.norm.weight": np.zeros(32, np.int8)},
            "model.norm.weight is I8",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(model, change, message, copy_of):
    directory = copy_of(model, change)
    with pytest.raises(UserError) as caught:
        load(directory)
    assert message in str(caught.value) and str(directory) in str(caught.value)


def test_buffers_of_old_checkpoints_that_every_reader_recomputes_are_ignored(copy_of):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert_trees_equal(load(copy_of("llama_bias", lambda t: t | extra)), load(GOLDEN / "llama_bias"))


def test_broken_and_missing_files_are_named(tmp_path):
    source = open_model(str(GOLDEN / "qwen3_tied"))

    def message():
        with pytest.raises(UserError) as caught:
            load_hf_params(tmp_path, source.sizes)
        return str(caught.value)

    assert "holds neither model.safetensors nor model.safetensors.index.json" in message()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is not read" in message()
    whole = (GOLDEN / "qwen3_tied/model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    assert f"{tmp_path / 'model.safetensors'}: not a readable safetensors file" in message()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert f"{index}: not a JSON object" in message()
    for weight_map in ('{"a": 3}', '{"a": "../other/a.safetensors"}'):
        index.write_text(f'{{"weight_map": {weight_map}}}')
        assert f"{index}: not an index" in message()
    index.write_text('{"weight_map": {"model.norm.weight": "a.safetensors"}}')
    assert f"{tmp_path / 'a.safetensors'}: is missing" in message()
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    assert "a.safetensors: tensor model.norm.weight is missing" in message()


PEAK = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxsp.model.hf_weights import read_headers
from jaxsp.model.source import load_params, open_model

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

source = open_model(sys.argv[1])
jax.block_until_ready(jnp.ones(8) + 1)
load_params(open_model(sys.argv[2]))
before = peak_bytes()
params = load_params(source)
used = peak_bytes() - before
target = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
largest = max(4 * int(np.prod(shape)) for shape in read_headers(source.path).shapes.values())
print(used, target, largest)
"""


def test_loading_needs_hardly_more_memory_than_the_parameters_themselves(tmp_path):
    config = json.loads((GOLDEN / "qwen3_untied/config.json").read_text()) | {
        "vocab_size": 24_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6,
        "layer_types": ["full_attention"] * 6, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    }  # fmt: skip
    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_text(json.dumps(config))
    sizes = open_model(str(big)).sizes
    (big / "config.json").unlink()
    export_hf(
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(sizes)),
        sizes,
        config,
        big,
        max_shard_bytes=60_000_000,
    )
    assert len(list(big.glob("*.safetensors"))) >= 5
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(big), str(GOLDEN / "qwen3_tied")], capture_output=True, text=True, check=True
    )
    used, target, largest = map(int, done.stdout.split())
    assert target > 300e6 and largest > 70e6
    assert used < target + 1.3 * largest
