"""`jaxsp chat`: a conversation with a model, on a terminal or over a pipe."""

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxsp.chat import Renderer
from jaxsp.config import SamplerConfig, UserError
from jaxsp.inference import STREAM_CHUNK, FoundModel, choose_context, load_engine
from jaxsp.policy import open_text_side
from jaxsp.rollout.seeds import derive_seed
from jaxsp.sampler.engine import Engine
from jaxsp.trajectory import Completion, GenerateRequest

COMMANDS = "/reset begins anew, /system TEXT begins anew with a system message, /exit leaves (as Ctrl-D does)"


@dataclass(frozen=True)
class Terminal:
    """Where a chat takes place.

    Attributes:
        read: the next line, without its end; raises EOFError where there are no more.
        write: the answers' text, a piece at a time.
        note: one line to the user about the chat itself.
    """

    read: Callable[[], str]
    write: Callable[[str], None]
    note: Callable[[str], None]

    @staticmethod
    def standard() -> "Terminal":
        """Answers to standard output; everything else, with a prompt only for a person, to standard error.

        Raises `UserError` where standard input is closed.
        """
        if sys.stdin is None:  # as `<&-` leaves it
            raise UserError("standard input is closed: there is nothing to read from")
        is_person = sys.stdin.isatty()
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        if is_person:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # a line can be edited, earlier ones come back

        return Terminal(
            read=lambda: input("> " if is_person else ""),
            write=lambda text: print(text, end="", flush=True),
            note=lambda text: print(f"[{text}]", file=sys.stderr, flush=True),
        )


@dataclass(frozen=True)
class ChatOptions:
    """How answers are drawn, see `GenerateRequest`; `max_context` None lets `choose_context` choose."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_context: int | None
    system: str | None


@dataclass(frozen=True)
class Conversation:
    """A token stream that only grows: what was sampled stays as it was sampled, so its keys and values are found again.

    `system` None leaves the system message to the renderer. `last_token` is the last one sampled.
    """

    renderer: Renderer
    system: str | None = None
    tokens: tuple[int, ...] = ()
    last_token: int | None = None

    def ask(self, text: str) -> "Conversation":
        """With the user's turn and the start of the assistant's."""
        message = {"role": "user", "content": text}
        if self.tokens:
            return replace(self, tokens=self.tokens + self.renderer.next_turn([message], self.last_token))
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return replace(self, tokens=self.renderer.prompt([*head, message]))

    def answer(self, tokens: tuple[int, ...]) -> "Conversation":
        """With what was sampled, be it cut short or nothing."""
        return replace(self, tokens=self.tokens + tokens, last_token=tokens[-1] if tokens else None)


def chat(model: FoundModel, options: ChatOptions, terminal: Terminal) -> None:
    """Opens the model and converses. Raises `UserError` naming what cannot be opened."""
    max_context = choose_context(model, options.max_context)
    text = open_text_side(model.config, model.source)
    sampler = SamplerConfig(num_slots=1, max_context=max_context, decode_chunk=STREAM_CHUNK)
    engine = load_engine(model, text.tokenizer, sampler)
    terminal.note(COMMANDS)
    converse(engine, text.renderer, replace(options, max_context=max_context), terminal)


def converse(engine: Engine, renderer: Renderer, options: ChatOptions, terminal: Terminal) -> None:
    """Answers line by line until there are no more, or one says `/exit`. Ctrl-C stops an answer, not the chat.

    `options.max_context` is the engine's.
    """
    conversation = Conversation(renderer, options.system)
    num_answers = 0
    while True:
        try:
            line = terminal.read()
            command, _, rest = line.partition(" ")
            if command == "/exit":
                return
            if command == "/reset":
                conversation = Conversation(renderer, conversation.system)
            elif command == "/system":
                conversation = Conversation(renderer, rest.strip() or options.system)
            elif command.startswith("/"):
                terminal.note(f"there is no {command}: {COMMANDS}; a line that begins with a space is only said")
            elif line.strip():
                num_answers += 1
                conversation = _answer(engine, conversation.ask(line), options, num_answers, terminal) or conversation
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.write("\n")
            terminal.note("/exit or Ctrl-D leaves")


def _answer(
    engine: Engine, asked: Conversation, options: ChatOptions, number: int, terminal: Terminal
) -> Conversation | None:
    """The conversation with an answer, or with as much of it as there was before Ctrl-C; None if it has no place."""
    assert options.max_context is not None
    num_left = options.max_context - len(asked.tokens)
    if num_left < 1:
        terminal.note(
            f"the conversation has {len(asked.tokens)} tokens with this turn, and the context holds "
            f"{options.max_context} (--max-context): it was not said; /reset begins anew"
        )
        return None
    request = GenerateRequest(
        tokens=asked.tokens,
        seed=derive_seed(options.seed, "chat", number),
        max_tokens=min(options.max_tokens, num_left),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_ids=asked.renderer.stop_ids,
        stop_strings=asked.renderer.stop_strings,
    )
    sampled: list[int] = []

    async def stream() -> Completion | None:
        before, completion = asked.renderer.before_reply, None
        async with contextlib.aclosing(engine.stream(request)) as deltas:
            async for delta in deltas:
                terminal.write(delta.text.removeprefix(before))
                before = "" if delta.text else before
                sampled.extend(delta.tokens)
                completion = delta.completion
        return completion

    try:
        completion = asyncio.run(stream())
    except KeyboardInterrupt:
        completion = None
    terminal.write("\n")
    if completion is None:
        terminal.note("stopped")
    elif completion.finish_reason == "length" and num_left <= options.max_tokens:
        terminal.note(f"the context of {options.max_context} tokens (--max-context) is full: /reset begins anew")
    elif completion.finish_reason == "length":
        terminal.note(f"cut after {options.max_tokens} tokens (--max-tokens)")
    return asked.answer(tuple(sampled))
