"""A model opened for use: its weights' source, tokenizer, chat format and sampler, from one name."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxsp.chat import Renderer, make_renderer
from jaxsp.config import ModelConfig, SamplerConfig, UsageError
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.model.source import ModelSource, open_model, tokenizer_path
from jaxsp.rollout.prompts import PromptSet, Proposal
from jaxsp.rollout.roles import Setting
from jaxsp.sampler.engine import Engine, make_engine
from jaxsp.tokenizer import Tokenizer, load_tokenizer
from jaxsp.trajectory import Generate
from jaxsp.verifiers.math_answer import Verdict
from jaxsp.verifiers.process_pool import ProcessPool
from jaxsp.verifiers.verify import answer_kind, is_valid_expression, verify


@dataclass(frozen=True, eq=False)
class TextSide:
    """What turns text into a model's tokens and back."""

    source: ModelSource
    tokenizer: Tokenizer
    renderer: Renderer


def open_text_side(model: ModelConfig, source: ModelSource | None = None) -> TextSide:
    """Reads config and tokenizer of `model.name` (`source`, where it is open already); no weights.

    Raises `UserError` naming what cannot be read.
    """
    source = open_model(model.name) if source is None else source
    tokenizer = load_tokenizer(tokenizer_path(source))
    return TextSide(source, tokenizer, open_renderer(model, source, tokenizer))


def open_renderer(model: ModelConfig, source: ModelSource, tokenizer: Tokenizer) -> Renderer:
    """The model's chat format. Raises `UsageError` if the tokenizer cannot speak it."""
    return make_renderer(
        tokenizer,
        model.renderer,
        model.thinking,
        eos_ids=source.eos_ids,
        default_system=model.system_prompt,
    )


def make_sampler(
    sizes: DecoderSizes,
    tokenizer: Tokenizer,
    sampler: SamplerConfig,
    compute_dtype: str,
    mesh: Mesh | None = None,
    *,
    steps_in_thread: bool = False,
) -> Engine:
    """A sampler for the model, without weights: `load` them before the first request.

    It decodes on `mesh` (`sampler_mesh` makes it; None: on the first device). For `steps_in_thread` see
    `make_engine`. Raises `UsageError` where `sampler.max_context` is more than the model was made for.
    """
    if sampler.max_context > sizes.max_positions:
        raise UsageError(
            f"sampler.max_context = {sampler.max_context} is more than the {sizes.max_positions} positions that the "
            f"model was made for; set it to {sizes.max_positions} or less"
        )
    return make_engine(
        sizes,
        num_slots=sampler.num_slots,
        max_context=sampler.max_context,
        decode_chunk=sampler.decode_chunk,
        prefill_tokens=sampler.prefill_tokens,
        page_tokens=sampler.page_tokens,
        cache_tokens=sampler.cache_tokens,
        max_waiting=sampler.max_waiting,
        attention=sampler.attention,
        weight_dtype=sampler.weight_dtype,
        products=sampler.products,
        compute_dtype=compute_dtype,
        decode_text=tokenizer.decode,
        mesh=mesh,
        steps_in_thread=steps_in_thread,
    )


def sampler_mesh(mesh: Mesh, sizes: DecoderSizes) -> Mesh:
    """The learner's devices, in their order, as the sampler uses them.

    Heads, MLP and vocabulary are split over as many of them as divide these, so that no weights travel while tokens
    are decoded; where devices are left, each part of weights and cache has copies on several.
    """
    num_parts = sampler_parts(mesh.size, sizes)
    shape = {**dict.fromkeys(mesh.axis_names, 1), "data": mesh.size // num_parts, "tensor": num_parts}
    return Mesh(mesh.devices.reshape(tuple(shape.values())), mesh.axis_names, axis_types=mesh.axis_types)


def sampler_parts(num_devices: int, sizes: DecoderSizes) -> int:
    """The largest number of parts into which heads, MLP, vocabulary and devices divide, and which divides the kv heads
    or is a multiple of them (each then stands on several devices)."""
    mlp_dims = (sizes.mlp_dim,) if sizes.moe is None else (sizes.mlp_dim, sizes.moe.mlp_dim)
    splits = math.gcd(num_devices, sizes.num_heads, *mlp_dims, sizes.vocab_size)
    kv_heads = sizes.num_kv_heads
    return max(n for n in range(1, splits + 1) if splits % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0))


def make_setting(text: TextSide, generate: Generate, prompts: PromptSet, pool: ProcessPool) -> Setting:
    """What roles need to play: sampler, chat format, prompts, and verifiers in the pool's processes."""

    async def check(proposal: Proposal, reply: str) -> Verdict:
        return await verify(pool, answer_kind(proposal.answer_type), proposal.answer, reply)

    async def parses(expression: str) -> bool:
        return await is_valid_expression(pool, expression)

    return Setting(generate, text.renderer, prompts, check, parses)


def check_vocabulary(text: TextSide, params: Params) -> None:
    """Raises `UsageError` if the tokenizer has ids that the model has no embedding for."""
    rows = params["embed"].shape[0]
    if text.tokenizer.vocab_size > rows:
        raise UsageError(f"the tokenizer has {text.tokenizer.vocab_size} tokens, the model embeds only {rows}")
