"""The verbs that somebody looks on at, through the entry point: `sample --stream`, `chat`, `serve`."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxsp.cli import main
from jaxsp.config import UserError
from jaxsp.serving.server import bind, listen
from tests.tiny import write_tiny_model

RUN_MAIN = "import sys; from jaxsp.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("talk") / "qwen3")


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


def output(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_streamed_sample_is_the_sample(model: Path, capsys) -> None:
    ask = ["sample", model, "--prompt", "one two", "--max-tokens", "13", "--chat"]
    assert output(capsys, *ask, "--stream") == output(capsys, *ask)
    whole = json.loads(output(capsys, *ask, "--json"))
    chunks = [json.loads(line) for line in output(capsys, *ask, "--stream", "--json").splitlines()]
    assert {tuple(chunk) for chunk in chunks} == {("tokens", "logprobs", "text", "finish_reason")}
    assert [len(chunk["tokens"]) for chunk in chunks] == [5, 4, 4]  # the first, and then four at a time
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["tokens"]
    assert [value for chunk in chunks for value in chunk["logprobs"]] == pytest.approx(whole["logprobs"], abs=1e-5)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["finish_reason"]]


def test_more_than_one_sample_cannot_be_streamed(model: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for source in (["--prompts", str(file)], ["--prompt", "a", "--num-samples", "2"]):
        assert main(["sample", str(model), *source, "--stream"]) == 2
        out, err = capsys.readouterr()
        assert (out, err) == ("", "jaxsp: --stream prints one sample while it is made: give one prompt, and no "
                                  "--num-samples\n")  # fmt: skip


def test_chat_reads_its_lines_from_a_pipe(model: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "one\n/system Be brief.\none\n/exit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode() + b"\xff\n")))
    ask = ["chat", str(model), "--max-tokens", "5", "--temperature", "0", "--max-context", "128"]
    assert main(ask) == 0
    out, err = capsys.readouterr()
    messages = [[{"role": "user", "content": "one"}], [{"role": "system", "content": "Be brief."}]]
    messages[1] += messages[0]
    file = model.parent / "messages.jsonl"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    sampled = output(capsys, "sample", model, "--prompts", file, "--max-tokens", "5", "--temperature", "0", "--json")
    assert out == "".join(json.loads(line)["text"] + "\n" for line in sampled.splitlines())
    assert err.splitlines()[0].startswith("[/reset begins anew, /system TEXT") and "> " not in out + err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(ask) == 1
    assert capsys.readouterr().err == "jaxsp: standard input is closed: there is nothing to read from\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main([*ask[:-1], "2000"]) == 2
    message = "--max-context 2000 is more than the 1024 positions that the model was made for"
    assert capsys.readouterr().err == f"jaxsp: {message}\n"


def test_without_a_standard_error_the_output_is_still_only_answers(model: Path) -> None:
    chat = f"exec {sys.executable} -c '{RUN_MAIN}' chat {model} --max-tokens 4 --temperature 0"
    shown = [
        subprocess.run(["sh", "-c", chat + end], input="one two\n", capture_output=True, text=True, check=True)
        for end in ("", " 2>&-")
    ]
    assert shown[0].stderr
    assert shown[1].stdout == shown[0].stdout


def test_serve_answers_until_it_is_told_to_stop(model: Path) -> None:
    command = [sys.executable, "-c", RUN_MAIN, "serve", str(model), "--port", "0", "--max-context", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith(f"{model}, 8 slots of 64 tokens, at http://127.0.0.1:")
        url = line.split(" at ")[1].strip()
        with urllib.request.urlopen(f"{url}/models", timeout=300) as response:
            assert json.load(response)["data"][0]["id"] == str(model)

        def ask() -> urllib.request.Request:
            body = json.dumps({"model": str(model), "prompt": "one two", "max_tokens": 50, "stream": True}).encode()
            return urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})

        urllib.request.urlopen(ask(), timeout=300).read()  # what it compiles may take longer than the server's grace
        with urllib.request.urlopen(ask(), timeout=300) as response:
            process.send_signal(signal.SIGTERM)
            events = response.read().decode().split("\n\n")  # an answer that has begun is finished
        assert events[-2:] == ["data: [DONE]", ""]
        assert process.wait(300) == 0
        assert process.stderr.read() == ""


def test_a_second_interrupt_ends_answers_with_an_error_at_once(model: Path) -> None:
    command = [sys.executable, "-c", RUN_MAIN, "serve", str(model), "--port", "0", "--num-slots", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split(" at ")[1].strip()

        def ask(is_streamed: bool, num_samples: int = 64) -> urllib.request.Request:
            body = {"model": str(model), "prompt": "one two", "max_tokens": 1000, "min_tokens": 1000,
                    "n": num_samples, "stream": is_streamed}  # fmt: skip
            return urllib.request.Request(
                f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )

        def refusal() -> tuple[int, dict]:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(ask(is_streamed=False), timeout=300)
            return refused.value.code, json.load(refused.value)

        urllib.request.urlopen(ask(is_streamed=False, num_samples=1), timeout=300).read()  # compiles
        with ThreadPoolExecutor() as pool, urllib.request.urlopen(ask(is_streamed=True), timeout=300) as response:
            whole = pool.submit(refusal)
            response.readline()
            wait_for_places(url, 128)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            events = response.read().decode().split("\n\n")
            status, error = whole.result(60)
        assert process.wait(60) == 130
        assert time.monotonic() - start < 10  # and not the grace that the first one leaves
        message = "the server stops before this answer is done; ask again when it is back"
        assert (status, error["error"]["message"], error["error"]["type"]) == (503, message, "server_error")
        assert json.loads(events[-2].removeprefix("data: ")) == error
        assert process.stderr.read() == "jaxsp: interrupted\n"


def wait_for_places(url: str, count: int) -> None:
    for _ in range(600):
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=60) as response:
            if json.load(response)["num_in_flight"] == count:
                return
        time.sleep(0.05)
    raise AssertionError(f"there were never {count} samples in flight")


def test_an_address_that_another_has_by_now_is_one_line() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:  # neither listens yet
            listen(first, 8)
            with pytest.raises(UserError, match=f"--port {port}: Address already in use; choose another"):
                listen(second, 8)


def test_an_address_that_cannot_be_had_is_one_line(model: Path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(model), "--port", str(port)]) == 1
    message = f"jaxsp: --host 127.0.0.1 --port {port}: Address already in use; choose another address or port\n"
    assert capsys.readouterr().err == message
    assert main(["serve", str(model), "--host", "no.such.host.invalid", "--port", "0"]) == 1
    assert capsys.readouterr().err.startswith("jaxsp: --host no.such.host.invalid --port 0: ")
    with pytest.raises(SystemExit):
        main(["serve", str(model), "--port", "70000"])
    assert "--port: '70000' is not a port, from 0 to 65535" in capsys.readouterr().err


def test_serve_without_its_extra_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['uvicorn'] = None\n" + RUN_MAIN
    result = subprocess.run(
        [sys.executable, "-c", program, "serve", "absent"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "jaxsp: jaxsp serve needs uvicorn, which is not there: pip install 'jaxsp[serve]'\n"
