"""A model used outside training: found by its name or in a run, sampled from, exported."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxsp.chat import Kind, Renderer, Thinking
from jaxsp.checkpoint import Checkpointer
from jaxsp.config import ModelConfig, RunConfig, SamplerConfig, UsageError, UserError, load_config
from jaxsp.json_lines import read_json_lines, read_object
from jaxsp.model.decoder import Params, abstract_params
from jaxsp.model.hf_weights import check_new_directory, export_hf
from jaxsp.model.sizes import DecoderSizes
from jaxsp.model.source import ModelSource, load_params, open_model, tokenizer_path
from jaxsp.policy import make_sampler, open_renderer
from jaxsp.rollout.seeds import derive_seed
from jaxsp.sampler.engine import Engine
from jaxsp.sampler.streaming import Delta
from jaxsp.tokenizer import Tokenizer, load_tokenizer
from jaxsp.trajectory import Completion, GenerateRequest

CONFIG_FILE = "config.yaml"
"""The resolved config in a run directory."""
CHAT_FILE = "jaxsp_chat.json"
"""In an export: the chat format that the run spoke, where it may differ from what its tokenizer suggests."""

NUM_SLOTS = 64
MAX_CONTEXT = 4096
STREAM_CHUNK = 4
"""Tokens decoded at once where somebody looks on."""


def read_run_config(run_dir: Path) -> RunConfig:
    """The config that a run was started with."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise UserError(f"{run_dir} is no run directory: it has no {CONFIG_FILE}")
    return load_config(run_dir / CONFIG_FILE)


@dataclass(frozen=True)
class FoundModel:
    """A model and the chat format it speaks, no weights read yet.

    `source` has its config and tokenizer, and its weights unless `run_dir` and `step` name a run's checkpoint.
    """

    config: ModelConfig
    source: ModelSource
    run_dir: Path | None = None
    step: int | None = None
    weight_dtype: Literal["float32", "bfloat16"] | None = None
    """Of a sampler's weights; None: the compute dtype."""


def find_model(
    name: str,
    *,
    compute_dtype: Literal["float32", "bfloat16"],
    renderer: Kind | Literal["auto"] | None = None,
    thinking: Thinking | None = None,
    step: int | None = None,
    weight_dtype: Literal["float32", "bfloat16"] | None = None,
) -> FoundModel:
    """The model called `name`: what `open_model` takes, or a run directory with a checkpoint (`step`: the newest).

    `renderer` and `thinking`, where given, replace what the run's config or the export's `CHAT_FILE` says. Raises
    `UserError` naming what is missing.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{name}: {error}") from error
    chosen = {field: value for field, value in (("renderer", renderer), ("thinking", thinking)) if value is not None}
    if not (path / CONFIG_FILE).is_file():
        config = ModelConfig(name, **{"compute_dtype": compute_dtype, **_chat_settings(path), **chosen})
        return FoundModel(config, open_model(name), weight_dtype=weight_dtype)
    config = replace(read_run_config(path).model, compute_dtype=compute_dtype, **chosen)
    with Checkpointer(path / "checkpoints", is_read_only=True) as checkpointer:
        steps = checkpointer.steps()
    if not steps:
        raise UserError(f"{path}: this run has no complete checkpoint yet; wait for one, or name its model")
    if step is not None and step not in steps:
        raise UserError(f"{path}: there is no checkpoint of step {step}; there are steps {steps}")
    return FoundModel(config, open_model(config.name), path, steps[-1] if step is None else step, weight_dtype)


def _chat_settings(directory: Path) -> dict[str, Any]:
    """The fields of `ModelConfig` that an export's `CHAT_FILE` sets; {} where there is none."""
    path = directory / CHAT_FILE
    if not path.is_file():
        return {}
    try:
        settings = read_object(path.read_bytes(), str(path))
        return {name: settings[name] for name in ("renderer", "thinking", "system_prompt")}
    except (OSError, KeyError) as error:
        raise UserError(f"{path}: not what `jaxsp export` writes ({error!r}); export anew or delete it") from error


def load_weights(model: FoundModel) -> Params:
    """The parameters, stacked, on the first device: in the compute dtype, or a checkpoint's own float32."""
    if model.run_dir is None or model.step is None:
        return load_params(model.source, dtype=jnp.dtype(model.config.compute_dtype))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params(model.source.sizes)
    )
    with Checkpointer(model.run_dir / "checkpoints", is_read_only=True) as checkpointer:
        return checkpointer.restore_part(model.step, ("state", "params"), abstract)


def open_engine(model: FoundModel, tokenizer: Tokenizer, lengths: Sequence[int]) -> Engine:
    """A sampler with the model's weights, for requests of these lengths (tokens of prompt and answer together)."""
    return load_engine(model, tokenizer, sampler_for(model, lengths))


def sampler_for(model: FoundModel, lengths: Sequence[int]) -> SamplerConfig:
    """Settings that are enough for requests of these lengths."""
    max_context = min(1 << (max(lengths) - 1).bit_length(), model.source.sizes.max_positions)
    return SamplerConfig(num_slots=min(NUM_SLOTS, len(lengths)), max_context=max_context)


def load_engine(
    model: FoundModel, tokenizer: Tokenizer, sampler: SamplerConfig, *, steps_in_thread: bool = False
) -> Engine:
    """A sampler with the model's weights, kept in its `weight_dtype`; for `steps_in_thread` see `make_engine`."""
    sampler = replace(sampler, weight_dtype=model.weight_dtype)
    engine = make_sampler(
        model.source.sizes, tokenizer, sampler, model.config.compute_dtype, steps_in_thread=steps_in_thread
    )
    engine.load(load_weights(model), policy_version=model.step or 0, consumes=True)
    return engine


def choose_context(model: FoundModel, asked: int | None) -> int:
    """Tokens that prompt and answer may have: `asked`, or `MAX_CONTEXT` where the model was made for as many.

    Raises `UsageError` if it was made for less than `asked`.
    """
    limit = model.source.sizes.max_positions
    if asked is not None and asked > limit:
        raise UsageError(f"--max-context {asked} is more than the {limit} positions that the model was made for")
    return min(MAX_CONTEXT, limit) if asked is None else asked


# Inputs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """What a user gave: `value` is a text (`prompt`, `text`), a list of `messages` or of `tokens`; `place` names it."""

    place: str
    field: str
    value: Any


def read_inputs(path: str, fields: Sequence[str]) -> list[Input]:
    """The lines of a JSONL file, each of which holds exactly one of `fields`; other names are left alone.

    Raises `UserError` naming file and line.
    """
    inputs = [_read_input(row, place, fields) for place, row in read_json_lines(path, "inputs")]
    if not inputs:
        raise UserError(f"{path} is empty; give lines with {' or '.join(fields)}")
    return inputs


def _read_input(row: dict[str, Any], place: str, fields: Sequence[str]) -> Input:
    found = [field for field in fields if field in row]
    if len(found) != 1:
        has = " and ".join(found) if found else "none of them"
        raise UserError(f"{place}: must be an object with exactly one of {', '.join(fields)}; it has {has}")
    (field,) = found
    value = row[field]
    is_ids = isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
    if field == "tokens" and not is_ids:
        raise UserError(f"{place}: tokens must be a list of whole numbers")
    if field == "messages" and not (isinstance(value, list) and value):
        raise UserError(f"{place}: messages must be a list of at least one message")
    if field in ("prompt", "text") and not isinstance(value, str):
        raise UserError(f"{place}: {field} must be a text")
    return Input(place, field, value)


@dataclass(frozen=True, eq=False)
class TextReader:
    """Inputs to tokens. Without a renderer there are no chats, without a tokenizer only tokens."""

    sizes: DecoderSizes
    tokenizer: Tokenizer | None
    renderer: Renderer | None = None
    is_chat: bool = False
    """Texts are what a user says to the assistant, and not text to go on with."""

    def tokens(self, given: Input, num_more: int = 0) -> tuple[int, ...]:
        """The ids of an input. Raises `UserError` if there are none, one is not the model's, or `num_more` tokens
        after them are more than it was made for."""
        tokens = self.encode(given)
        if not tokens:
            raise UserError(
                f"{given.place}: {given.field} is empty, and this model's texts begin with no special token"
            )
        outside = next((token for token in tokens if not 0 <= token < self.sizes.vocab_size), None)
        if outside is not None:
            raise UserError(
                f"{given.place}: token {outside} is outside the model's vocabulary, {self.sizes.vocab_size}"
            )
        if len(tokens) + num_more > self.sizes.max_positions:
            more = f" and --max-tokens {num_more} are" if num_more else " are"
            raise UserError(
                f"{given.place}: {len(tokens)} tokens{more} more than the {self.sizes.max_positions} that the model "
                "was made for (max_position_embeddings); shorten the one or lower the other"
            )
        return tokens

    def encode(self, given: Input) -> tuple[int, ...]:
        """The ids of an input, whatever they are."""
        if given.field == "tokens":
            return tuple(given.value)
        assert self.tokenizer is not None
        messages = given.value if given.field == "messages" else [{"role": "user", "content": given.value}]
        if given.field == "messages" or self.is_chat:
            assert self.renderer is not None
            try:
                return self.renderer.prompt(messages)
            except UserError as error:
                raise type(error)(f"{given.place}: {error}") from error
        bos = () if self.tokenizer.bos_id is None else (self.tokenizer.bos_id,)
        return (*bos, *self.tokenizer.encode(given.value))


# Sampling ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleOptions:
    """How samples are drawn; see `GenerateRequest`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_strings: Sequence[str]
    seed: int
    num_samples: int
    is_chat: bool
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    choices: Sequence[str] = ()
    """Texts; each is a choice with the end of a sample after it."""
    wants_raw: bool = False


def sample(
    model: FoundModel,
    prompts: Sequence[Input],
    options: SampleOptions,
    write: Callable[[GenerateRequest, Completion], None],
) -> None:
    """Draws `num_samples` samples of each prompt and calls `write` with each, as soon as those before it are done.

    They come prompt by prompt. Each has a seed of its own, derived from `options.seed` and its place, so the same
    call gives the same samples. Raises `UserError` naming the prompt that cannot be used, before any weights are read.
    """
    requests, tokenizer = _make_requests(model, prompts, options)
    engine = open_engine(model, tokenizer, [len(request.tokens) + request.max_tokens for request in requests])

    async def in_order() -> None:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        try:
            for request, task in zip(requests, tasks, strict=True):
                write(request, await task)
        finally:
            for task in tasks:
                task.cancel()

    asyncio.run(in_order())


def stream_sample(model: FoundModel, prompt: Input, options: SampleOptions, write: Callable[[Delta], None]) -> None:
    """Draws the first sample that `sample` would, and calls `write` with each part of it as it comes."""
    (request, *_), tokenizer = _make_requests(model, [prompt], options)
    sampler = replace(sampler_for(model, [len(request.tokens) + request.max_tokens]), decode_chunk=STREAM_CHUNK)
    engine = load_engine(model, tokenizer, sampler)

    async def read() -> None:
        async with contextlib.aclosing(engine.stream(request)) as deltas:
            async for delta in deltas:
                write(delta)

    asyncio.run(read())


def _make_requests(
    model: FoundModel, prompts: Sequence[Input], options: SampleOptions
) -> tuple[list[GenerateRequest], Tokenizer]:
    tokenizer = load_tokenizer(tokenizer_path(model.source))
    has_chat = options.is_chat or any(prompt.field == "messages" for prompt in prompts)
    renderer = open_renderer(model.config, model.source, tokenizer) if has_chat else None
    reader = TextReader(model.source.sizes, tokenizer, renderer, options.is_chat)
    requests = [
        request for index, prompt in enumerate(prompts) for request in _requests(model, reader, prompt, index, options)
    ]
    return requests, tokenizer


def sample_seed(seed: int, prompt: int, number: int) -> int:
    """The seed of a sample, by the seed that was asked for and its place: which prompt, and which sample of it."""
    return derive_seed(seed, "sample", prompt, number)


def stops(
    source: ModelSource, tokenizer: Tokenizer, renderer: Renderer | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids and texts that end a sample: in a chat its format's stops, in a text (no renderer) an end of text."""
    if renderer is not None:
        return renderer.stop_ids, renderer.stop_strings
    own = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return tuple(dict.fromkeys((*source.eos_ids, *own))), ()


def _requests(
    model: FoundModel, reader: TextReader, prompt: Input, index: int, options: SampleOptions
) -> Iterator[GenerateRequest]:
    tokens = reader.tokens(prompt, options.max_tokens)
    assert reader.tokenizer is not None
    is_chat = prompt.field == "messages" or options.is_chat
    stop_ids, stop_strings = stops(model.source, reader.tokenizer, reader.renderer if is_chat else None)
    choices = _as_choices(options.choices, reader.tokenizer, stop_ids)
    for number in range(options.num_samples):
        yield GenerateRequest(
            tokens=tokens,
            seed=sample_seed(options.seed, index, number),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            stop_ids=stop_ids,
            stop_strings=(*stop_strings, *options.stop_strings),
            min_tokens=options.min_tokens,
            repetition_penalty=options.repetition_penalty,
            choices=choices,
            wants_raw=options.wants_raw,
        )


def _as_choices(texts: Sequence[str], tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Each text's tokens and the first stop id: so none begins another one, and the model says where it ends."""
    if texts and not stop_ids:
        raise UserError("--choices: this model has no stop id that could end a choice")
    return tuple((*tokenizer.encode(text), stop_ids[0]) for text in texts)


# Export --------------------------------------------------------------------------------------------------------------


def export_run(run_dir: Path, directory: Path, step: int | None, dtype: Literal["float32", "bfloat16"]) -> int:
    """Writes a run's checkpoint (`step`: the newest) as a Hugging Face directory, and returns its step.

    The directory has the tokenizer's files and the run's chat format, so that `find_model` opens it as the run was.
    Raises `UserError` if it exists and is not empty, before anything is read.
    """
    read_run_config(run_dir)  # the message for what is no run
    check_new_directory(directory)
    model = find_model(str(run_dir), compute_dtype="float32", step=step)
    source, tokenizer = model.source, tokenizer_path(model.source)
    settings = asdict(model.config)
    chat = {name: settings[name] for name in ("renderer", "thinking", "system_prompt")}
    export_hf(
        load_weights(model),
        source.sizes,
        source.config,
        directory,
        dtype=dtype,
        tokenizer_from=tokenizer,
        extra_files={CHAT_FILE: json.dumps(chat, indent=2) + "\n"},
    )
    assert model.step is not None
    return model.step
