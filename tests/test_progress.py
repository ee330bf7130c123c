"""What a user sees of how far a run is."""

import asyncio
import io
import time

from rich.console import Console

from jaxsp.progress import Progress, counted
from jaxsp.trajectory import Completion, GenerateRequest


def test_without_a_terminal_progress_is_lines_that_come_also_when_nothing_is_reported():
    stream = io.StringIO()
    with Progress(4, "quickstart", console=Console(file=stream), interval_s=0.05) as progress:
        progress.phase("warm_start", 2)
        progress.advance(1.0, loss=1.23456)
        progress.activity("challenger samples", 12, 32)
        time.sleep(0.3)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("quickstart 0/4 steps, warm_start 0/2, elapsed 0:00:00, left ?")
    assert len(lines) >= 4
    assert "quickstart 1/4 steps, warm_start 1/2, challenger samples 12/32, " in lines[-1]
    assert "1.0 s/step, elapsed 0:00:00, left ? (0:00:01 of warm_start)" in lines[-1]
    assert lines[-1].endswith("loss 1.23")
    assert "\x1b" not in stream.getvalue()


def test_the_time_left_ignores_steps_done_before_a_resume_and_follows_the_phase(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("jaxsp.progress.time.monotonic", lambda: now_s)
    progress = Progress(20, "run", start_step=10, console=Console(file=io.StringIO()))
    progress.phase("warm_start", 12, done=10)
    now_s += 4.0
    progress.advance(4.0)
    assert "4.0 s/step, elapsed 0:00:04, left ? (0:00:04 of warm_start)" in progress.line()
    now_s += 2.0
    progress.advance(2.0)
    progress.phase("joint", 8)
    now_s += 90.0
    assert progress.line().endswith("elapsed 0:01:36, left ?"), "steps of another phase say nothing about these"
    now_s += 30.0
    progress.advance(30.0)
    assert "30.0 s/step, elapsed 0:02:06, left 0:03:30" in progress.line(), "an evaluation came before, but is no step"
    now_s += 100.0
    assert "30.0 s/step, elapsed 0:03:46, left 0:03:30" in progress.line()


def test_on_a_terminal_progress_draws_bars_with_rates_and_times():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150)
    with Progress(4, "quickstart", console=console) as progress:
        progress.phase("joint", 4)
        progress.advance(0.1, reward=0.25)
        progress.activity("reasoner samples", 3, 8)
        progress.log("a line of its own [not markup]")
        progress.activity("reasoner samples", 5, 8)
    shown = stream.getvalue()
    for text in ("quickstart", "1/4 steps", "elapsed 0:00:00", "left", "reward 0.25", "joint", "5/8", "[not markup]"):
        assert text in shown


def test_answers_without_a_terminal_are_counted_a_line_at_a_time(monkeypatch, capsys):
    now_s = 100.0
    monkeypatch.setattr("jaxsp.progress.time.monotonic", lambda: now_s)
    request, completion = GenerateRequest((1,), 0, 1), Completion((2,), (-0.5,), "two", "length", 0)

    async def generate(asked: GenerateRequest) -> Completion:
        nonlocal now_s
        assert asked is request
        now_s += 10.0
        return completion

    async def answer_five_times() -> list[Completion]:
        with counted(generate, total=5) as generate_counted:
            return [await generate_counted(request) for _ in range(5)]

    assert asyncio.run(answer_five_times()) == [completion] * 5
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", ["jaxsp: 2 of 5 answers", "jaxsp: 4 of 5 answers"])
