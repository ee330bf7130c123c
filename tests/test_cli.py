"""The verbs, through the entry point: what they print, and one message with the right exit code for what is wrong."""

import json
import shlex
from pathlib import Path

import pytest

from jaxsp import cli, verbs
from jaxsp.cli import main
from jaxsp.command_line import make_parser
from jaxsp.config import UserError
from jaxsp.metrics import MetricsWriter
from tests.tiny import write_tiny_model, write_tiny_run

QUESTIONS = [
    {"question": "What is 2 + 3?", "answer": "5", "kind": "sums"},
    {"question": "What is 2 + 4?", "answer": "6", "kind": "sums"},
    {"question": "Which is a colour? (A) red (B) two", "answer": "A", "answer_type": "choice", "kind": "words"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models `qwen3` and `reward`, and the run `run` of the first."""
    path = tmp_path_factory.mktemp("cli")
    write_tiny_model(path / "qwen3")
    write_tiny_model(path / "reward", num_labels=1)
    write_tiny_run(path / "run", path / "qwen3", steps=(2, 4))
    return path


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def json_lines(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict]:
    assert main([*map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_sample_gives_a_json_line_for_each_sample(directory: Path, tmp_path: Path, capsys) -> None:
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"tokens": [7, 8, 9]}]
    file = write_lines(tmp_path / "prompts.jsonl", rows)
    arguments = ["sample", directory / "qwen3", "--prompts", file, "--max-tokens", "3", "--num-samples", "2"]
    lines = json_lines(capsys, *arguments)
    assert len(lines) == 6
    for line in lines:
        assert list(line) == ["prompt_tokens", "tokens", "logprobs", "text", "finish_reason"]
        assert len(line["tokens"]) == len(line["logprobs"]) <= 3
        assert line["finish_reason"] in ("stop", "length")
        assert all(logprob <= 0 for logprob in line["logprobs"])
    assert [line["prompt_tokens"] for line in lines[::2]] == [line["prompt_tokens"] for line in lines[1::2]]
    assert lines[4]["prompt_tokens"] == [7, 8, 9]
    assert json_lines(capsys, *arguments) == lines


def test_sample_is_one_of_the_choices_and_tells_the_raw_logprobs(directory: Path, capsys) -> None:
    arguments = ["sample", directory / "run", "--prompt", "one", "--max-tokens", "8", "--num-samples", "4", "--raw"]
    rows = json_lines(capsys, *arguments, "--choices", "two", "three", "--min-p", "0.01")
    assert {row["text"] for row in rows} <= {"two", "three"}
    for row in rows:
        assert row["finish_reason"] == "stop"
        assert len(row["raw_logprobs"]) == len(row["kept_mass"]) == len(row["tokens"])
        assert all(raw <= own + 1e-5 for raw, own in zip(row["raw_logprobs"], row["logprobs"], strict=True))


def test_a_streamed_sample_has_the_raw_logprobs_of_the_whole_one(directory: Path, capsys) -> None:
    arguments = ["sample", directory / "run", "--prompt", "one", "--max-tokens", "30", "--top-k", "5", "--raw"]
    (whole,), parts = json_lines(capsys, *arguments), json_lines(capsys, *arguments, "--stream")
    for name in ("tokens", "logprobs", "raw_logprobs", "kept_mass"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_raw_logprobs_without_json_have_no_place_to_go(directory: Path, capsys) -> None:
    assert main(["sample", str(directory / "run"), "--prompt", "one", "--raw"]) == 2
    assert capsys.readouterr().err == "jaxsp: --raw adds to the lines of --json; add that too\n"


def test_sample_gives_readable_text_without_json(directory: Path, capsys) -> None:
    arguments = ["sample", str(directory / "run"), "--prompt", "one", "--max-tokens", "2", "--temperature", "0"]
    (line,) = json_lines(capsys, *arguments)
    assert main(arguments) == 0
    assert capsys.readouterr().out == line["text"] + "\n"
    assert main([*arguments, "--num-samples", "2", "--chat"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
    assert heads == [f"--- --prompt, sample {number}: 2 tokens, length" for number in (1, 2)]


def test_score_gives_log_probabilities_or_a_score(directory: Path, tmp_path: Path, capsys) -> None:
    file = write_lines(tmp_path / "in.jsonl", [{"tokens": [5, 6, 7]}, {"text": "one"}])
    first, second = json_lines(capsys, "score", directory / "qwen3", "--input", file)
    assert list(first) == ["tokens", "logprobs"] and first["tokens"] == [5, 6, 7]
    assert first["logprobs"][0] is None and len(first["logprobs"]) == 3
    assert len(second["tokens"]) == len(second["logprobs"])
    (reward, _) = json_lines(capsys, "score", directory / "reward", "--input", file)
    assert list(reward) == ["tokens", "logprobs", "score"]
    assert reward["logprobs"] is None and isinstance(reward["score"], float)
    assert main(["score", str(directory / "qwen3"), "--input", str(file)]) == 0
    total = sum(first["logprobs"][1:])
    assert f"{file}:1: 3 tokens, log-probability {total:.4f}, {total / 2:.4f} each" in capsys.readouterr().out


def test_verify_gives_a_verdict_for_each_response(tmp_path: Path, capsys) -> None:
    rows = [
        {"reference": "12", "response": r"It is \boxed{12}."},
        {"reference": 12, "response": r"\boxed{13}"},
        {"reference": "12", "response": "no box"},
    ]
    file = write_lines(tmp_path / "in.jsonl", rows)
    lines = json_lines(capsys, "verify", "--kind", "math", "--input", file)
    assert lines == [
        {"correct": True, "status": "ok", "extracted": "12"},
        {"correct": False, "status": "ok", "extracted": "13"},
        {"correct": False, "status": "no_answer", "extracted": None},
    ]
    assert main(["verify", "--kind", "math", "--input", str(file)]) == 0
    assert "1 of 3 right (33.3%)" in capsys.readouterr().out


def test_eval_reports_kinds_and_writes_every_answer(directory: Path, tmp_path: Path, capsys) -> None:
    file = write_lines(tmp_path / "questions.jsonl", QUESTIONS)
    arguments = ["eval", directory / "qwen3", "--questions", file, "--max-tokens", "4", "--num-samples", "2"]
    (report,) = json_lines(capsys, *arguments, "--output", tmp_path / "answers.jsonl", "--temperature", "1")
    assert {kind: value["count"] for kind, value in report["kinds"].items()} == {"sums": 2, "words": 1}
    assert report["overall"] == {"mean": 0.0, "error": 0.0, "count": 3}
    assert sum(report["status_fracs"].values()) == pytest.approx(1)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["question"] for answer in answers] == [row["question"] for row in QUESTIONS for _ in range(2)]
    assert set(answers[0]) >= {"reference", "response", "correct", "status", "extracted", "finish_reason"}
    assert main([*map(str, arguments)]) == 0
    table = capsys.readouterr().out
    assert "sums" in table and "words" in table and "0.0% ±  0.0" in table and "verifier: " in table


def test_export_writes_a_model_and_says_where(directory: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "export"
    arguments = ["export", str(directory / "run"), "--out", str(out), "--dtype", "float32"]
    assert main([*arguments, "--step", "2"]) == 0
    assert capsys.readouterr().out == f"wrote step 2 to {out}\n"
    sampled = ["--prompt", "one", "--max-tokens", "2", "--temperature", "0"]
    (exported,) = json_lines(capsys, "sample", out, *sampled)
    (newest,) = json_lines(capsys, "sample", directory / "run", *sampled)
    assert exported["tokens"] != newest["tokens"]
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"jaxsp: {out}: exists and is not an empty directory; export to a new one\n"


def test_report_prints_a_runs_table_once_more(directory: Path, tmp_path: Path, capsys) -> None:
    run_dir = tmp_path / "run"
    write_tiny_run(run_dir, directory / "qwen3")
    assert main(["report", str(run_dir)]) == 0
    assert "no evaluation yet" in capsys.readouterr().out
    rows = [
        {"step": s, "rows": {"reasoner accuracy": {"mean": m, "error": 0.05, "count": 80}}}
        for s, m in ((0, 0.25), (4, 0.5))
    ]
    write_lines(run_dir / "evaluations.jsonl", rows)
    with MetricsWriter(run_dir) as metrics:
        metrics.write(1, {"reward/challenger_mean": 0.5})
    assert main(["report", str(run_dir)]) == 0
    table = capsys.readouterr().out
    assert "25.0% ±  5.0" in table and "50.0% ±  5.0" in table and "+25.0 ±  7.1" in table
    assert "rollout" in table and "total" in table


SMALL = """
model:
  name: {model}
sampler:
  num_slots: 8
  max_context: 256
spice:
  prompts: compact
  challenger_max_tokens: 64
  reasoner_max_tokens: 32
corpus:
  max_segment_tokens: 64
evaluation:
  questions: null
"""


def test_a_dry_run_says_what_a_config_amounts_to(directory: Path, tmp_path: Path, capsys) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(SMALL.format(model=directory / "qwen3"))
    # An override may also stand behind an option.
    assert main(["train", str(config), "spice.num_steps=2", "--dry-run", "spice.num_steps=3", "seed=9"]) == 0
    out = capsys.readouterr().out
    assert "num_steps: 3" in out and "seed: 9" in out
    assert "mesh                  data 1, fsdp 1, context 1, expert 1, tensor 1" in out
    assert "sampler rows          1, 4, 8\n" in out and "sampler contexts      256\n" in out
    assert "sampler split         1 part of weights and cache, on 1 device each\n" in out
    no_kernel = "(cpu {} float32, and model.compute_dtype is bfloat16)\n"
    assert "sampler attention     xla, pages of 16 tokens " + no_kernel.format("computes in") in out
    assert "sampler products      xla " + no_kernel.format("multiplies") in out
    num_params = 640 * 32 + 32 + 2 * (32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16)
    assert f"qwen3, {num_params:,} parameters, 2 layers" in out
    assert "KV cache (2048 tokens)" in out and "total" in out
    assert not (tmp_path / "runs").exists()


def test_the_hints_at_a_runs_end_are_those_of_its_config(tmp_path: Path) -> None:
    from jaxsp.config import EvaluationConfig, ModelConfig, RunConfig

    def hints(is_done: bool = True, **evaluation) -> list[list[str]]:
        lines: list[str] = []
        config = RunConfig(ModelConfig("m"), evaluation=EvaluationConfig(**evaluation))
        verbs._print_next(config, tmp_path / "my runs" / "a", is_done, lambda line, **_: lines.append(line))
        return [shlex.split(line) for line in lines if line.startswith("  ")]

    run_dir = str(tmp_path / "my runs" / "a")
    own = hints(questions="my questions.jsonl", num_samples=4, temperature=0.7)
    assert own[1] == ["jaxsp", "eval", run_dir, "--questions", "my questions.jsonl", "--num-samples", "4",
                      "--temperature", "0.7"]  # fmt: skip
    assert hints(questions=None)[1] == ["jaxsp", "eval", run_dir, "--questions", "embedded"]
    for words in (*own, *hints(is_done=False)):
        if words[0] == "jaxsp":
            make_parser().parse_args(words[1:])
    assert hints(is_done=False) == [["jaxsp", "train", "--resume", run_dir]]


def test_eval_puts_questions_as_the_run_did(directory: Path, tmp_path: Path, capsys) -> None:
    run_dir = tmp_path / "run"
    write_tiny_run(run_dir, directory / "qwen3")
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("reasoner_max_tokens: 1024", "reasoner_max_tokens: 5"))
    config.write_text(config.read_text().replace("prompts: full", "prompts: compact"))
    file = write_lines(tmp_path / "questions.jsonl", QUESTIONS[:1])

    def answers(*options: str) -> dict:
        json_lines(capsys, "eval", run_dir, "--questions", file, "--output", tmp_path / "out.jsonl", *options)
        return json.loads((tmp_path / "out.jsonl").read_text())

    own = answers()
    assert own["num_tokens"] == 5 and own["finish_reason"] == "length"
    assert own == answers("--prompts", "compact", "--max-tokens", "5") != answers("--prompts", "full")


USAGE_ERRORS = [
    (["sample", "{model}"], "one of the arguments --prompt --prompts is required"),
    (["sample", "{model}", "--prompt", "a", "--prompts", "b"], "not allowed with argument"),
    (["sample", "{model}", "--prompt", "a", "--max-tokens", "0"], "--max-tokens: '0' is not a whole number from 1"),
    (["sample", "{model}", "--prompt", "a", "--temperature", "nan"], "--temperature: 'nan' is not a number from 0"),
    (["sample", "{model}", "--prompt", "a", "--repetition-penalty", "0"], "'0' is not a number above 0"),
    (["sample", "{model}", "--prompt", "a", "--top-p", "0"], "--top-p: '0' is not above 0 and at most 1"),
    (["sample", "{model}", "--prompt", "a", "--min-p", "1"], "--min-p: '1' is not at least 0 and below 1"),
    (["sample", "{model}", "--prompt", "a", "--top-k", "x"], "--top-k: 'x' is not a whole number from 0"),
    (["sample", "{model}", "--prompt", "a", "--stop", ""], "--stop: an empty text"),
    (["sample", "{model}", "--prompt", "a", "--choices", "b", ""], "--choices: an empty text"),
    (["serve", "{model}", "--api-key", ""], "--api-key: an empty key would let everybody in"),
    (["sample", "{model}", "--prompt", "a", "seed=3"], "unrecognized arguments: seed=3"),
    (["verify", "--kind", "maths", "--input", "x"], "invalid choice: 'maths'"),
    (["verify", "--kind", "math", "--input", "x", "--timeout", "0"], "--timeout: '0' is not a number above 0"),
    (["train", "x.yaml", "--dry-ran"], "unrecognized arguments: --dry-ran"),
    (["tarin"], "invalid choice: 'tarin'"),
    ([], "the following arguments are required: VERB"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE_ERRORS)
def test_a_command_line_that_cannot_be_meant_exits_with_2(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


ERRORS = [
    (["train"], 2, "train needs a config file, or --resume RUN_DIR"),
    (["train", "absent.yaml"], 2, "config file absent.yaml does not exist"),
    (["train", "a=b", "--resume", "run"], 2, "--resume takes the run's own config"),
    (["train", "--resume", "{tmp}"], 1, "{tmp} is no run directory"),
    (["train", "{config}", "spice.num_step=4"], 2, "Did you mean: 'num_steps'?"),
    (["train", "{config}", "mesh.tensor=3", "--dry-run"], 2, "mesh.tensor = 3"),
    (["train", "{config}", "model.name={tmp}/absent", "--dry-run"], 1, "{tmp}/absent: no such model"),
    (["train", "{config}", "model.renderer=llama3", "--dry-run"], 2, "model.renderer = llama3 needs the tokens"),
    (["train", "{config}", "mesh.context=2", "--dry-run"], 2, "mesh.context = 2: nothing is split over it yet; set"),
    (["train", "{config}", "mesh.expert=-1", "--dry-run"], 2, "mesh.expert = -1: the model has no experts to split"),
    (["train", "{config}", "spice.temperature=0", "--dry-run"], 2, "spice.temperature = 0.0 must be above 0"),
    (
        ["train", "{config}", "spice.trains_challenger=false", "spice.trains_reasoner=false", "--dry-run"],
        2,
        "nothing would be trained",
    ),
    (["train", "{config}", "corpus.path={tmp}/absent.jsonl", "--dry-run"], 1, "corpus {tmp}/absent.jsonl does not"),
    (["train", "{config}", "corpus.path=embedded:cooking", "--dry-run"], 1, "has no topic 'cooking'; it has quantit"),
    (["train", "{config}", "evaluation.questions={empty}", "--dry-run"], 1, "{empty} holds no question"),
    (
        ["train", "{config}", "warm_start.conversations={tmp}/no", "warm_start.num_steps=1", "--dry-run"],
        1,
        "warm_start.conversations",
    ),
    (
        ["train", "{config}", "sampler.max_context=2048", "--dry-run"],
        2,
        "sampler.max_context = 2048 is more than the 1024 positions",
    ),
    (
        ["train", "{config}", "sampler.max_context=100", "--dry-run"],
        2,
        "(corpus.max_segment_tokens = 64, spice.challenger_max_tokens = 64), more than sampler.max_context = 100; an ",
    ),
    (
        ["train", "{config}", "learner.row_tokens=170", "--dry-run"],
        2,
        "an attempt of the challenger can take 180 tokens with its prompt (corpus.max_segment_tokens = 64, spice",
    ),
    (["sample", "{tmp}/absent", "--prompt", "a"], 1, "{tmp}/absent: no such model"),
    (["sample", "{tmp}", "--prompt", "a"], 1, "{tmp}: holds no config.json"),
    (["sample", "{model}", "--prompt", ""], 1, "--prompt: prompt is empty"),
    (["sample", "{model}", "--prompt", "a", "--chat", "--renderer", "llama3"], 2, "needs the tokens"),
    (["sample", "{model}", "--prompts", "absent.jsonl"], 1, "absent.jsonl cannot be read: No such file"),
    (["sample", "{model}", "--prompts", "{empty}"], 1, "{empty} is empty"),
    (["sample", "{reward}", "--prompt", "a"], 1, "no language head"),
    (["score", "{model}", "--input", "{bad}"], 1, "{bad}:1: not a line of JSON"),
    (["verify", "--kind", "text", "--input", "{bad}"], 1, "{bad}:1: not a line of JSON"),
    (["verify", "--kind", "text", "--input", "{empty}"], 1, "{empty} is empty"),
    (["eval", "{model}", "--questions", "{bad}"], 1, "{bad}:1: not a line of JSON"),
    (["eval", "{model}", "--questions", "{empty}"], 1, "{empty} holds no question"),
    (["eval", "{model}", "--questions", "embedded:total", "--output", "{tmp}/no/a"], 1, "--output {tmp}/no/a cannot"),
    (["export", "{model}", "--out", "{tmp}/out"], 1, "{model} is no run directory"),
    (["export", "{run}", "--out", "{tmp}/out", "--step", "3"], 1, "no checkpoint of step 3; there are steps [2, 4]"),
    (["report", "{tmp}/absent"], 1, "{tmp}/absent is no run directory"),
    (["report", "x" * 300], 1, "File name too long; mend the name"),
    (["sample", "x" * 300, "--prompt", "a"], 1, "File name too long; mend the name"),
    (["sample", "~nosuchuser/x", "--prompt", "a"], 1, "~nosuchuser/x: Could not determine home directory"),
    (["sample", "{model}", "--prompt", "a", "--top-p", "1e-46"], 1, "top_p = 1e-46 is not between 1e-06 and 1"),
    (["sample", "{model}", "--prompt", "a", "--temperature", "1e39"], 1, "temperature = 1e+39 is neither 0 (greedy)"),
    (["eval", "{model}", "--questions", "embedded:total", "--output", ""], 1, "--output '' names no file"),
]


@pytest.mark.parametrize(
    ("arguments", "status", "message"), ERRORS, ids=lambda value: None if isinstance(value, int) else str(value)[:60]
)
def test_what_the_user_can_mend_is_one_line(
    directory: Path, tmp_path: Path, capsys, arguments: list[str], status: int, message: str
) -> None:
    names = {
        "tmp": tmp_path, "model": directory / "qwen3", "reward": directory / "reward", "run": directory / "run",
        "empty": tmp_path / "empty.jsonl", "bad": tmp_path / "bad.jsonl", "config": tmp_path / "a.yaml",
    }  # fmt: skip
    names["empty"].write_text("")
    names["bad"].write_text("{'a': 1}\n")
    names["config"].write_text(SMALL.format(model=directory / "qwen3"))
    assert main([argument.format(**names) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxsp: ") and err.count("\n") == 1 and message.format(**names) in err


def test_an_evaluation_that_fails_leaves_the_earlier_answers(directory: Path, tmp_path: Path, capsys) -> None:
    questions = write_lines(tmp_path / "questions.jsonl", QUESTIONS)
    answers = tmp_path / "answers.jsonl"
    answers.write_text("earlier\n")
    arguments = ["eval", directory / "qwen3", "--questions", questions, "--output", answers, "--max-tokens", 5000]
    assert main([*map(str, arguments)]) != 0
    assert "jaxsp: " in capsys.readouterr().err
    assert answers.read_text() == "earlier\n"
    assert sorted(tmp_path.iterdir()) == [answers, questions]


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run directory"):
        main(["report", str(tmp_path), "--debug"])


def test_what_nobody_foresaw_is_one_line_too() -> None:
    message, status = cli._explain(ValueError("odd\nsecond line"))
    assert (message, status) == ("internal error: ValueError: odd; run it with --debug for the traceback", 1)
    assert cli._explain(OSError(28, "No space left on device", "a.bin"))[0].startswith(
        "no space left on the disk for a.b"
    )
    assert "out of memory" in cli._explain(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"))[0]
