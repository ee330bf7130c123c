"""The task pool: what goes in comes out, a killed step leaves nothing, and resuming undoes what came later."""

import dataclasses
import resource
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsp.config import UserError
from jaxsp.task_pool import TaskPool, task_pool_path
from jaxsp.trajectory import Task


def make_task(task_id: str, step: int = 0, **changes) -> Task:
    task = Task(
        task_id=task_id,
        text="How many legs have 3 spiders?",
        answer="24",
        answer_type="integer",
        role="challenger",
        step=step,
        policy_version=step,
        source="document-7",
        is_valid=True,
        reason="ok",
    )
    return dataclasses.replace(task, **changes)


def test_tasks_come_back_equal_in_order_and_by_step_and_validity(tmp_path):
    tasks = [
        make_task("b", 0, text="¿Cuánto? \n \\frac{1}{2} 😀", answer=r"\frac{1}{2}"),
        make_task("a", 0, is_valid=False, reason="no_box", answer=""),
        make_task("c", 1, solve_rate=0.25),
    ]
    with TaskPool(tmp_path / "run" / "tasks.sqlite") as pool:
        pool.add(tasks[:2])
        pool.add(tasks[2:])
    with TaskPool(tmp_path / "run" / "tasks.sqlite") as pool:
        assert pool.tasks() == tasks
        assert pool.tasks(step=0) == tasks[:2]
        assert pool.tasks(is_valid=False) == tasks[1:2]
        assert pool.tasks(step=0, is_valid=True) == tasks[:1]
        assert pool.tasks(step=9) == []
        assert all(type(task.is_valid) is bool for task in pool.tasks())
        assert len(pool) == 3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_any_text_survives(tmp_path_factory, texts):
    tasks = [make_task(str(place), text=text, answer=text, source=text) for place, text in enumerate(texts)]
    with TaskPool(tmp_path_factory.mktemp("pool") / "tasks.sqlite") as pool:
        pool.add(tasks)
        assert pool.tasks() == tasks


def test_each_process_has_a_file_of_its_own(tmp_path):
    assert task_pool_path(tmp_path) == tmp_path / "tasks.sqlite"
    assert task_pool_path(tmp_path, 3) == tmp_path / "tasks-3.sqlite"


def contents(path) -> list:
    with sqlite3.connect(path) as database:
        return [database.execute(f"select * from {table}").fetchall() for table in ("tasks", "uses")]


def test_uses_are_recorded_by_step(tmp_path):
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        pool.add([make_task("a", 2), make_task("b", 2), make_task("c", 2)])
        pool.record_uses(["b", "a"], 2)
        pool.record_uses(["b"], 9)
        pool.record_uses([], 10)
    assert sorted(contents(tmp_path / "tasks.sqlite")[1]) == [("a", 2), ("b", 2), ("b", 9)]


def test_dropping_after_a_step_gives_the_pool_of_that_step(tmp_path):
    def play(pool: TaskPool, step: int) -> None:
        with pool.transaction():
            pool.add([make_task(f"{step}-{place}", step, solve_rate=step / 10) for place in range(3)])
            pool.record_uses(["0-0", f"{step}-1"], step)

    with TaskPool(tmp_path / "whole.sqlite") as whole, TaskPool(tmp_path / "resumed.sqlite") as resumed:
        for step in range(4):
            play(whole, step)
        for step in range(3):
            play(resumed, step)
        assert resumed.drop_after(1) == 3
        assert len(resumed) == 6
        assert sorted(contents(tmp_path / "resumed.sqlite")[1]) == [("0-0", 0), ("0-0", 1), ("0-1", 0), ("1-1", 1)]
        for step in (2, 3):
            play(resumed, step)
    assert contents(tmp_path / "resumed.sqlite") == contents(tmp_path / "whole.sqlite")


def test_a_task_id_twice_is_refused_and_adds_nothing(tmp_path):
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        pool.add([make_task("a")])
        with pytest.raises(ValueError, match="unique"):
            pool.add([make_task("b"), make_task("a")])
        assert [task.task_id for task in pool.tasks()] == ["a"]


def test_a_use_of_an_unknown_task_or_twice_in_a_step_is_refused_and_records_nothing(tmp_path):
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        pool.add([make_task("a")])
        for task_ids in (["a", "x"], ["a", "a"]):
            with pytest.raises(ValueError, match="a use is of a task in the pool, once a step"):
                pool.record_uses(task_ids, 0)
        pool.record_uses(["a"], 0)
    assert contents(tmp_path / "tasks.sqlite")[1] == [("a", 0)]


def test_a_step_that_raises_leaves_nothing(tmp_path):
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        with pytest.raises(RuntimeError), pool.transaction():
            pool.add([make_task("a")])
            raise RuntimeError
        assert pool.tasks() == []
        pool.add([make_task("a")])
        assert len(pool) == 1


def test_a_process_killed_in_the_middle_of_a_step_leaves_whole_steps(tmp_path):
    path = tmp_path / "tasks.sqlite"
    program = """
import os, signal, sys
from jaxsp.task_pool import TaskPool
from jaxsp.trajectory import Task
pool = TaskPool(sys.argv[1])
make = lambda step, i: Task(f"{step}-{i}", "q", "a", "string", "challenger", step, step, "doc", True, "ok")
for step in range(3):
    with pool.transaction():
        pool.add([make(step, i) for i in range(50)])
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with TaskPool(path) as pool:
        assert [len(pool.tasks(step=step)) for step in range(3)] == [50, 50, 0]
        pool.add([make_task("2-0", 2)])
        assert len(pool) == 101


def test_files_that_are_no_task_pool_are_named_and_left_alone(tmp_path):
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to have a header of its own " * 5)
    with sqlite3.connect(tmp_path / "other.sqlite") as database:
        database.execute("create table recipes (name text)")
    with TaskPool(tmp_path / "newer.sqlite"):
        pass
    with sqlite3.connect(tmp_path / "newer.sqlite") as database:
        database.execute("pragma user_version = 99")
    (tmp_path / "folder.sqlite").mkdir()
    for name, message in {
        "text": "not a task pool",
        "other": "not a task pool",
        "newer": "format 99",
        "folder": "cannot be opened",
    }.items():
        path = tmp_path / f"{name}.sqlite"
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(UserError, match=f"{name}.sqlite.*{message}"):
            TaskPool(path)
        assert (path.read_bytes() if path.is_file() else None) == before


def test_a_locked_pool_is_named_but_can_be_read(tmp_path):
    path = tmp_path / "tasks.sqlite"
    with TaskPool(path) as writer, TaskPool(path, lock_timeout_s=0.1) as second:
        with writer.transaction():
            writer.add([make_task("a")])
            assert second.tasks() == [], "readers see the last commit"
            with pytest.raises(UserError, match=r"tasks\.sqlite is locked"):
                second.add([make_task("b")])
        second.add([make_task("b")])
        assert [task.task_id for task in writer.tasks()] == ["a", "b"]


def test_a_disk_that_refuses_a_write_is_one_message_that_names_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        pool.add([make_task("before")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # stands for a full disk
        try:
            with pytest.raises(UserError, match=r"tasks\.sqlite cannot be read or written.*free space.*resume"):
                pool.add([make_task("after", text="x" * 100_000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [task.task_id for task in pool.tasks()] == ["before"]
    with TaskPool(tmp_path / "tasks.sqlite") as pool:
        assert [task.task_id for task in pool.tasks()] == ["before"]


def test_two_programs_may_open_a_new_pool_together(tmp_path):
    problems = []

    def open_it() -> None:
        try:
            TaskPool(tmp_path / "tasks.sqlite").close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
