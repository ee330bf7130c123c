"""Samples as they come: their deltas make the completion, never take text back, and free the slot when left."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_sampler import assert_same_samples, generate_all, prompt, text_of, tiny_engine, tiny_params

from jaxsp.config import UserError
from jaxsp.sampler.engine import Engine
from jaxsp.sampler.scheduler import find_ending
from jaxsp.sampler.streaming import Decoded, Delta, decode_more, new_stops, num_certain
from jaxsp.tokenizer import load_tokenizer
from jaxsp.trajectory import GenerateRequest
from tests.tiny import GOLDEN, decode_bytes

LLAMA = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]},
    "added_tokens": [{"id": 1, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": True}],
    "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "merges": [],
              "vocab": {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)},
                        "▁": 258, "a": 259, "▁b": 260, "\ufffd": 261}},
}  # fmt: skip
"""A tokenizer.json as Llama 2 has it: what its pieces do not hold is spelled by bytes."""
BYTES_OF_LLAMA = [token + 2 for token in (0x41, 0xE2, 0x96, 0x81, 0xF0, 0x9F, 0x90, 0x84, 0xC3, 0xFF)]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Sequence[int]], str]]:
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    path.write_text(json.dumps(LLAMA))
    qwen3 = load_tokenizer(GOLDEN / "tokenizer_qwen3_small")
    return {"bytes": decode_bytes, "llama": load_tokenizer(path).decode, "qwen3": qwen3.decode, "digits": text_of}


ALPHABETS = {
    "bytes": st.sampled_from([*b"aab ", *"é🐄".encode(), 0xFF, 300]),
    "llama": st.sampled_from([1, 258, 259, 260, 261, *BYTES_OF_LLAMA]),
    "qwen3": st.integers(0, 639),
    "digits": st.integers(0, 3),
}
STOPS = {
    "bytes": ["aa", "ab a", "é", "🐄a", "\ufffda", "é🐄"], "llama": ["aAa", "bA", " b b", "▁a", "A🐄"],
    "qwen3": ["e", " the", "\n\n"], "digits": ["001", "00200", "1"],
}  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize("name", ALPHABETS)
def test_text_given_out_early_is_how_the_completion_begins(decoders, name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(ALPHABETS[name], min_size=1, max_size=30))
    stops = tuple(data.draw(st.lists(st.sampled_from(STOPS[name]), max_size=2)))
    cuts = [*range(data.draw(st.integers(1, 4)), len(tokens), data.draw(st.integers(1, 5))), len(tokens)]
    decode = decoders[name]
    min_tokens = data.draw(st.integers(0, len(tokens)))
    request = GenerateRequest((1,), 0, len(tokens), stop_strings=stops, min_tokens=min_tokens)
    done, given_out, num_checked = Decoded(), "", 0
    for cut in cuts:
        before, (text, done) = done, decode_more(done, tokens[:cut], decode)
        ending = find_ending(request, tokens[:cut], num_checked, decode)
        assert find_ending(request, tokens[:cut], num_checked, decode, new_stops(before, text, stops)) == ending
        if ending is not None:
            assert ending.text.startswith(given_out)
            return
        assert text == decode(tokens[:cut])
        certain = text[: num_certain(text, stops)]
        assert certain.startswith(given_out)
        given_out, num_checked = certain, cut
    raise AssertionError("max_tokens ends every sample")


def test_only_what_may_still_change_is_held_back() -> None:
    assert num_certain("what is it", ("\nUser:",)) == 10
    assert num_certain("what is it\nUs", ("\nUser:", "sofa")) == 10
    assert num_certain("aXa", ("XaXb",)) == 1
    assert num_certain("cow \ufffd", ()) == 4
    assert num_certain("\ufffd" * 5, ()) == 2
    assert num_certain("", ("a",)) == 0


def test_decoding_goes_on_where_it_was(decoders) -> None:
    seen: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decoders["qwen3"](tokens)

    tokens = [t % 640 for t in range(4000)]
    done = Decoded()
    for end in range(10, 4001, 10):
        text, done = decode_more(done, tokens[:end], decode)
    assert text == decoders["qwen3"](tokens)
    assert max(seen) < 300  # ids 256 to 639 come in runs without a whole character


def test_a_sample_with_stop_strings_decodes_what_is_new_and_not_all_of_it_again():
    """Else a long answer would cost the square of its length."""
    seen: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return text_of(tokens)

    requests = [GenerateRequest(prompt(0, 5), 0, 400, stop_strings=(stop,)) for stop in ("no such text", "a")]
    for completion in generate_all(tiny_engine(max_context=512, decode_text=decode), requests):
        assert len(completion.tokens) == 400
    assert sorted(seen)[-3] < 20  # all of it once for each of the two


async def read(engine: Engine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.stream(request)]


def assert_deltas_make_the_completion(deltas: Sequence[Delta]) -> None:
    whole = deltas[-1].completion
    assert whole is not None and [delta.completion for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens
    assert tuple(value for delta in deltas for value in delta.behaviour_logprobs) == whole.behaviour_logprobs
    assert tuple(value for delta in deltas for value in delta.raw_logprobs) == whole.raw_logprobs
    assert tuple(value for delta in deltas for value in delta.kept_mass) == whole.kept_mass
    assert "".join(delta.text for delta in deltas) == whole.text


@pytest.mark.parametrize("steps_in_thread", [False, True])
def test_streams_give_what_generate_gives_a_chunk_at_a_time(steps_in_thread: bool) -> None:
    requests = [GenerateRequest(prompt(i, 4 + 7 * i), i, 9 + 4 * i) for i in range(6)]
    expected = generate_all(tiny_engine(), requests)
    stop = expected[3].text[10:14]
    requests.append(dataclasses.replace(requests[3], stop_strings=(stop,)))
    requests.append(dataclasses.replace(requests[4], wants_raw=True, top_k=20))
    expected = generate_all(tiny_engine(), requests)
    engine = tiny_engine(steps_in_thread=steps_in_thread)

    async def both() -> tuple[list, list]:
        streams = asyncio.gather(*(read(engine, request) for request in requests))
        whole = asyncio.gather(*(engine.generate(request) for request in requests))
        return await streams, await whole

    streams, whole = asyncio.run(both())
    assert_same_samples(whole, expected)
    for deltas, request, completion in zip(streams, requests, expected, strict=True):
        assert_deltas_make_the_completion(deltas)
        assert_same_samples([deltas[-1].completion], [completion])
        if not request.stop_strings:
            assert len(deltas) >= request.max_tokens // 5
    engine.load(tiny_params(), 4)  # nothing is in flight, no page in use


@pytest.mark.parametrize("steps_in_thread", [False, True])
def test_leaving_a_stream_frees_its_slot(steps_in_thread: bool) -> None:
    engine = tiny_engine(num_slots=1, steps_in_thread=steps_in_thread)

    async def run() -> None:
        async with contextlib.aclosing(engine.stream(GenerateRequest(prompt(0, 5), 0, 100))) as deltas:
            async for _ in deltas:
                break
        reader = asyncio.create_task(read(engine, GenerateRequest(prompt(1, 5), 0, 100)))
        waiting = asyncio.create_task(read(engine, GenerateRequest(prompt(2, 5), 0, 100)))
        num_tokens = engine.stats()["sampler/num_sampled_tokens"]
        while engine.stats()["sampler/num_sampled_tokens"] < num_tokens + 3:
            await asyncio.sleep(0)
        reader.cancel()
        waiting.cancel()
        assert (await read(engine, GenerateRequest(prompt(2, 5), 0, 3)))[-1].completion is not None
        assert reader.cancelled() and waiting.cancelled()

    asyncio.run(run())
    assert engine.stats()["sampler/num_sampled_tokens"] < 40
    engine.load(tiny_params(), 4)


def test_an_error_and_a_request_that_cannot_be_meant_reach_the_reader() -> None:
    def decode_text(tokens: Sequence[int]) -> str:
        if len(tokens) > 5:
            raise RuntimeError("no more text")
        return text_of(tokens)

    engine = tiny_engine(decode_text=decode_text, steps_in_thread=True)
    with pytest.raises(RuntimeError, match="no more text"):
        asyncio.run(read(engine, GenerateRequest(prompt(0, 5), 0, 12)))
    with pytest.raises(UserError, match="max_tokens = 0"):
        asyncio.run(read(engine, GenerateRequest(prompt(0, 5), 0, 0)))
    assert len(asyncio.run(read(engine, GenerateRequest(prompt(0, 5), 0, 3)))[-1].tokens) > 0


def test_the_event_loop_runs_on_while_a_step_in_a_thread_does_not_end() -> None:
    def decode_text(tokens: Sequence[int]) -> str:
        time.sleep(0.2)
        return text_of(tokens)

    async def run() -> int:
        engine = tiny_engine(decode_text=decode_text, steps_in_thread=True)
        task = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 5), 0, 1)))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        return num_turns

    assert asyncio.run(run()) >= 5


def test_an_event_loop_that_ends_waits_for_the_step_in_the_thread() -> None:
    engine = tiny_engine(steps_in_thread=True)

    async def run() -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 5), 0, 100)))
        while not engine.stats()["sampler/num_sampled_tokens"]:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(run())
    engine.load(tiny_params(), 4)
    request = GenerateRequest(prompt(0, 5), 0, 5)
    assert_same_samples(
        [dataclasses.replace(each, policy_version=3) for each in generate_all(engine, [request])],
        generate_all(tiny_engine(), [request]),
    )


def test_a_step_that_fails_while_the_event_loop_ends_leaves_nothing_behind() -> None:
    begun = threading.Event()

    def decode_text(tokens: Sequence[int]) -> str:
        begun.set()
        time.sleep(0.1)
        raise RuntimeError("no text")

    engine = tiny_engine(decode_text=decode_text, steps_in_thread=True)

    async def run() -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 20), 0, 1)))
        while not begun.is_set():
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(run())
    engine.load(tiny_params(), 4)  # it refuses while a page is in use


def test_bytes_that_are_no_character_spoil_none_beside_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(LLAMA))
    tokenizer = load_tokenizer(tmp_path)
    cow, broken, a, end = [token + 2 for token in "🐄".encode()], [0xFF + 2], [259], [1]
    assert tokenizer.decode(cow + a) == "🐄a"
    assert tokenizer.decode(cow + broken + cow + end + a) == "🐄\ufffd🐄a"
    assert tokenizers.Tokenizer.from_str(json.dumps(LLAMA)).decode(cow + broken) == "\ufffd" * 5  # the library's own
    assert tokenizer.decode([258, 260, 258, 259]) == " b a"
