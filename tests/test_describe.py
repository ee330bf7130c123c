"""What a config amounts to, against sizes added up by hand."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxsp.config import LearnerConfig, ModelConfig, RunConfig, SamplerConfig
from jaxsp.describe import memory_estimate
from jaxsp.mesh import make_mesh
from jaxsp.model.source import open_model
from tests.tiny import write_tiny_model


def test_the_memory_estimate_counts_every_copy(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(str(write_tiny_model(tmp_path / "qwen3"))),
        learner=LearnerConfig(kl_coef=0.1),
        sampler=SamplerConfig(num_slots=8, max_context=128),
    )
    sizes = open_model(config.model.name).sizes
    memory = memory_estimate(config, sizes, make_mesh(1, 1, 1, 1, 1, jax.devices()[:1]))
    num_scales = 32 + 2 * (2 * 32 + 2 * 16)
    num_params = 640 * 32 + 2 * (32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48) + num_scales
    assert memory["parameters"] == memory["reference"] == 4 * num_params
    assert memory["gradients, and those of a micro-batch"] == 2 * 4 * num_params
    assert memory["optimizer moments"] == pytest.approx(8 * num_params, abs=16)  # and the count of updates
    assert memory["sampler weights (bfloat16)"] == 2 * (num_params - num_scales) + 4 * num_scales
    assert memory["KV cache (1024 tokens)"] == 2 * 2 * 2 * 16 * 8 * 128 * 2
    wider = replace(config, sampler=replace(config.sampler, weight_dtype="float32"))
    memory = memory_estimate(wider, sizes, make_mesh(1, 1, 1, 1, 1, jax.devices()[:1]))
    assert memory["sampler weights (float32)"] == 4 * num_params
    assert memory["KV cache (1024 tokens)"] == 2 * 2 * 2 * 16 * 8 * 128 * 2
