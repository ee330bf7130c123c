"""Conversations on a terminal: turns that append, answers that stream, commands, Ctrl-C, a full context."""

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from jaxsp.config import SamplerConfig
from jaxsp.inference import find_model, load_engine
from jaxsp.policy import TextSide, open_text_side
from jaxsp.rollout.seeds import derive_seed
from jaxsp.sampler.engine import Engine
from jaxsp.terminal_chat import ChatOptions, Conversation, Terminal, converse
from jaxsp.trajectory import GenerateRequest
from tests.tiny import write_tiny_model

OPTIONS = ChatOptions(
    max_tokens=20,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    seed=5,
    max_context=256,
    system="Be brief.",
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, TextSide]:
    path = write_tiny_model(tmp_path_factory.mktemp("chat") / "qwen3")
    model = find_model(str(path), compute_dtype="float32")
    text = open_text_side(model.config, model.source)
    return load_engine(model, text.tokenizer, SamplerConfig(num_slots=1, max_context=256, decode_chunk=4)), text


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def talk(
    opened: tuple[Engine, TextSide],
    lines: Iterable[str],
    on_write: Callable[[str], None] = lambda text: None,
    **options,
) -> tuple[str, list[str]]:
    """What `converse` writes and notes, given these lines."""
    engine, text = opened
    engine.forget_prefixes()
    engine.reset_stats()
    written, notes, source = [], [], iter(lines)

    def read() -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    def write(piece: str) -> None:
        written.append(piece)
        on_write(piece)

    converse(engine, text.renderer, replace(OPTIONS, **options), Terminal(read, write, notes.append))
    return "".join(written), notes


def expected_answers(opened: tuple[Engine, TextSide], conversations: list[list[str]], system: str) -> list[str]:
    """The answers in conversations of such user's turns, each sampled with its whole stream."""
    engine, text = opened
    answers: list[str] = []
    for turns in conversations:
        tokens: tuple[int, ...] = ()
        sampled: tuple[int, ...] = ()
        for turn in turns:
            message = {"role": "user", "content": turn}
            if sampled:
                tokens += sampled + text.renderer.next_turn([message], sampled[-1])
            else:
                tokens = text.renderer.prompt([{"role": "system", "content": system}, message])
            seed = derive_seed(OPTIONS.seed, "chat", len(answers) + 1)
            request = GenerateRequest(tokens, seed, OPTIONS.max_tokens, stop_ids=text.renderer.stop_ids)
            completion = asyncio.run(engine.generate(request))
            sampled = completion.tokens
            answers.append(completion.text)
    return answers


def test_turns_append_and_find_what_was_computed(opened) -> None:
    lines = ["Hello there", "", "And now?", "And tomorrow?"]
    written, _ = talk(opened, lines)
    stats = opened[0].stats()
    answers = expected_answers(opened, [[line for line in lines if line]], "Be brief.")
    assert written == "".join(f"{answer}\n" for answer in answers)
    assert talk(opened, lines)[0] == written
    # Each turn computes what is new and at most a page and a sampled token of what is not.
    renderer = opened[1].renderer
    new = len(renderer.prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": lines[0]}]))
    new += sum(len(renderer.next_turn([{"role": "user", "content": line}], None)) for line in lines[2:])
    assert stats["sampler/num_prefill_tokens"] <= new + 2 * 17
    assert stats["sampler/num_shared_prompt_tokens"] > stats["sampler/num_prefill_tokens"]


def test_an_answer_comes_in_pieces(opened) -> None:
    pieces: list[str] = []
    talk(opened, ["Hello there"], pieces.append)
    assert len([piece for piece in pieces if piece.strip()]) >= 3


def test_commands_begin_anew_change_the_system_message_and_leave(opened) -> None:
    written, notes = talk(opened, ["one", "/reset", "one", "/nothing here", "/exit", "never read"])
    assert written.splitlines() == "\n".join(expected_answers(opened, [["one"], ["one"]], "Be brief.")).splitlines()
    assert [note for note in notes if "no /nothing" in note and "/reset" in note and "/system TEXT" in note]
    written, _ = talk(opened, ["/system Be long.", "one", "/system", "one"])
    first, second = (expected_answers(opened, [["one"], ["one"]], system) for system in ("Be long.", "Be brief."))
    assert written == f"{first[0]}\n{second[1]}\n"


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(opened, ctrl_c) -> None:
    num_interrupts = 0

    def interrupt(piece: str) -> None:
        nonlocal num_interrupts
        if num_interrupts == 0 and piece.strip():
            num_interrupts = 1
            ctrl_c()

    written, notes = talk(opened, ["Hello there", "And now?"], interrupt, max_tokens=100, temperature=0.0)
    whole, _ = talk(opened, ["Hello there"], max_tokens=100, temperature=0.0)
    assert notes[0] == "stopped"
    assert whole.startswith(written.split("\n")[0]) and len(written.split("\n")[0]) < len(whole)
    assert opened[0].stats()["sampler/num_requests"] == 1


def test_ctrl_c_between_answers_says_how_to_leave(opened, ctrl_c) -> None:
    def lines() -> Iterable[str]:
        yield "one"
        ctrl_c()

    written, notes = talk(opened, lines())
    assert notes[-1] == "/exit or Ctrl-D leaves" and written.endswith("\n")


def test_a_full_context_is_said_and_a_turn_without_room_is_not_taken(opened) -> None:
    long = "word " * 60
    written, notes = talk(opened, [long, long, "/reset", "one"], max_tokens=1000)
    assert notes[0] == "the context of 256 tokens (--max-context) is full: /reset begins anew"
    assert "and the context holds 256 (--max-context): it was not said; /reset begins anew" in notes[1]
    assert written.count("\n") >= 2
    _, notes = talk(opened, ["one"])
    assert notes == ["cut after 20 tokens (--max-tokens)"]


def test_an_interrupted_answer_without_a_token_is_closed_like_any_other(opened) -> None:
    renderer = opened[1].renderer
    conversation = Conversation(renderer).ask("one").answer(())
    message = {"role": "user", "content": "two"}
    assert conversation.ask("two").tokens == conversation.tokens + renderer.next_turn([message], None)
