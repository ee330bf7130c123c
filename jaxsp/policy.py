"""A model opened for use: its weights' source, tokenizer, chat format and sampler, from one name."""

from dataclasses import dataclass

from jaxsp.chat import Renderer, make_renderer
from jaxsp.config import ModelConfig, SamplerConfig, UsageError
from jaxsp.model.decoder import Params
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


def open_text_side(model: ModelConfig) -> TextSide:
    """Reads config and tokenizer of `model.name`; no weights. Raises `UserError` naming what cannot be read."""
    source = open_model(model.name)
    tokenizer = load_tokenizer(tokenizer_path(source))
    renderer = make_renderer(
        tokenizer,
        model.renderer,
        model.thinking,
        eos_ids=source.eos_ids,
        default_system=model.system_prompt,
    )
    return TextSide(source, tokenizer, renderer)


def make_sampler(text: TextSide, sampler: SamplerConfig, compute_dtype: str) -> Engine:
    """A sampler for the model, without weights: `load` them before the first request.

    `sampler.max_context` beyond what the model was made for is cut to that.
    """
    return make_engine(
        text.source.sizes,
        num_slots=sampler.num_slots,
        max_context=min(sampler.max_context, text.source.sizes.max_positions),
        decode_chunk=sampler.decode_chunk,
        prefill_tokens=sampler.prefill_tokens,
        compute_dtype=compute_dtype,
        decode_text=text.tokenizer.decode,
    )


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
