import asyncio
import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from jaxsp.config import UserError
from jaxsp.verifiers.process_pool import ProcessPool

# Functions of the standard library stand for checks: `time:sleep` hangs politely, `pow(9, 9**9)` holds the
# interpreter lock for hours, and `os:_exit` is a crash.
HOLDS_THE_LOCK = ("builtins:pow", 9, 9**9)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def wait_until(claim, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if claim():
            return True
        time.sleep(0.02)
    return claim()


def test_values_and_exceptions_come_back():
    with ProcessPool(1) as pool:
        assert pool.run("operator:add", "x" * 10**6, "y" * 10**6).value == "x" * 10**6 + "y" * 10**6
        error = pool.run("math:sqrt", -1)
        assert error.status == "error" and error.value is None and "ValueError" in error.detail
        assert pool.run("sys:exit", 3).status == "error"
        assert pool.run("threading:Lock").status == "error"  # cannot be pickled on its way back
        assert pool.run("operator:add", lambda: 0, 1).status == "error"  # nor this on its way there
        assert pool.run(os.path.basename, "a/b").value == "b"
        assert pool.counts()["restarted"] == 0


@pytest.mark.parametrize("hang", [("time:sleep", 60), HOLDS_THE_LOCK])
def test_a_hung_call_costs_its_deadline_while_twenty_others_finish(hang):
    with ProcessPool(2) as pool:
        begin = time.monotonic()
        hung = pool.submit(*hang, timeout_s=1.0)
        others = [pool.submit("operator:add", i, 1) for i in range(20)]
        assert [other.result(5).value for other in others] == [i + 1 for i in range(20)]
        assert not hung.done()
        assert hung.result(5).status == "timeout"
        assert 0.95 < time.monotonic() - begin < 5.0
        assert pool.counts() == {"ok": 20, "timeout": 1, "died": 0, "error": 0, "retried": 0, "restarted": 1}


def test_more_hung_calls_than_workers_let_others_through_after_their_deadlines():
    with ProcessPool(2) as pool:
        hung = [pool.submit(*HOLDS_THE_LOCK, timeout_s=0.5) for _ in range(3)]
        others = [pool.submit("operator:add", i, i) for i in range(10)]
        assert [other.result(20).value for other in others] == [2 * i for i in range(10)]
        assert [future.result(20).status for future in hung] == ["timeout"] * 3


def test_waiting_in_the_queue_does_not_count_towards_the_deadline():
    with ProcessPool(1) as pool:
        calls = [pool.submit("time:sleep", 0.3, timeout_s=0.8) for _ in range(4)]
        assert [call.result(10).status for call in calls] == ["ok"] * 4


def test_a_worker_killed_in_a_call_is_replaced_and_the_call_tried_once_more():
    with ProcessPool(1) as pool:
        pid = pool.run(os.getpid).value
        call = pool.submit("time:sleep", 0.5)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert call.result(10).status == "ok"
        assert pool.run(os.getpid).value != pid
        assert pool.counts()["retried"] == 1


def test_a_call_that_kills_its_worker_twice_is_reported_as_died():
    with ProcessPool(1) as pool:
        outcome = pool.run("os:_exit", 7)
        assert outcome.status == "died" and "exit code 7" in outcome.detail
        assert pool.run("operator:add", 1, 2).value == 3
        assert pool.counts() == {"ok": 1, "timeout": 0, "died": 1, "error": 0, "retried": 1, "restarted": 2}


def test_a_worker_killed_while_idle_costs_no_call_anything():
    with ProcessPool(1) as pool:
        pid = pool.run(os.getpid).value
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        assert pool.run("operator:add", 1, 2).value == 3
        assert pool.counts()["retried"] == 0


def test_a_worker_that_eats_memory_is_killed_and_the_call_not_repeated():
    with ProcessPool(1, memory_limit_bytes=200 << 20) as pool:
        grows = pool.run("builtins:eval", "[bytes(2**20 + i) + b'x' for i in range(700)] and 0", timeout_s=30)
        assert grows.status == "died" and "200 MiB" in grows.detail
        at_once = pool.run("builtins:bytearray", 10**10)
        assert at_once.status == "died" and "800 MiB of address space" in at_once.detail
        assert pool.counts()["retried"] == 0
        assert pool.run("operator:add", 1, 2).value == 3


def test_workers_are_recycled_after_their_number_of_calls():
    with ProcessPool(1, calls_per_worker=3) as pool:
        pids = [pool.run(os.getpid).value for _ in range(7)]
        assert [len(set(pids[i : i + 3])) for i in (0, 3)] == [1, 1]
        assert len(set(pids)) == 3


def test_workers_leave_jax_alone_and_their_output_goes_nowhere(capfd):
    with ProcessPool(1, preload=("jaxsp.verifiers.verify", "math_verify")) as pool:
        assert pool.run("builtins:eval", "'jax' in __import__('sys').modules").value is False
        assert pool.run("builtins:print", "noise").status == "ok"
        assert pool.run("os:write", 1, b"noise").status == "ok"
        assert pool.run("os:write", 2, b"noise").status == "ok"
    assert capfd.readouterr() == ("", "")


def test_a_blocked_event_loop_makes_no_timeouts():
    async def play(pool: ProcessPool):
        call = asyncio.ensure_future(pool.call("operator:add", 1, 2, timeout_s=0.8))
        await asyncio.sleep(0)
        time.sleep(1.5)  # as device work does
        return await call

    with ProcessPool(1) as pool:
        assert asyncio.run(play(pool)).value == 3


def test_a_cancelled_coroutine_leaves_the_pool_usable():
    async def play(pool: ProcessPool):
        call = asyncio.ensure_future(pool.call("time:sleep", 0.3))
        await asyncio.sleep(0.1)
        call.cancel()
        return await pool.call("operator:add", 1, 2)

    with ProcessPool(1) as pool:
        assert asyncio.run(play(pool)).value == 3


def test_closing_ends_running_and_queued_calls_and_leaves_no_process():
    with ProcessPool(2) as pool:
        pids = {pool.run(os.getpid).value for _ in range(20)}
        grandchild = pool.run("builtins:eval", "__import__('subprocess').Popen(['sleep', '60']).pid").value
        running = [pool.submit(*HOLDS_THE_LOCK, timeout_s=60) for _ in range(2)]
        queued = pool.submit("operator:add", 1, 2)
        time.sleep(0.2)
        begin = time.monotonic()
    assert time.monotonic() - begin < 3
    assert [future.result(0).status for future in running] == ["died"] * 2
    assert queued.cancelled()
    assert not any(is_running(pid) for pid in pids)
    assert wait_until(lambda: not is_running(grandchild), 2)
    assert not [pid for pid in pids if pid in children_of(os.getpid())]  # no zombies either
    with pytest.raises(ValueError, match="not running"):
        pool.submit("operator:add", 1, 2)


def test_no_worker_outlives_a_parent_killed_with_sigkill():
    script = (
        "import os, time\n"
        "from jaxsp.verifiers.process_pool import ProcessPool\n"
        "pool = ProcessPool(2).start()\n"
        "pool.submit('builtins:pow', 9, 9**9, timeout_s=600)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    # A script without a main guard: workers must not run it again.
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    workers = children_of(parent.pid)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(is_running(pid) for pid in workers), 5)


def test_a_worker_that_cannot_start_is_a_user_error_with_its_own_words():
    with pytest.raises(UserError, match="No module named 'no_such_module'"):
        ProcessPool(2, preload=("no_such_module",)).start()
    with pytest.raises(UserError, match=r"not ready within 0\.01 s"):
        ProcessPool(1, preload=("math_verify",), start_timeout_s=0.01).start()


@contextlib.contextmanager
def free_descriptors(count: int):
    """Within, this process may open `count` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = open_descriptors()
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def open_descriptors() -> set[int]:
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {number for number in listed if os.path.lexists(f"/proc/self/fd/{number}")}  # without the listing's own


@pytest.mark.parametrize("count", range(8))
def test_no_descriptors_left_is_one_error_at_the_start_and_leaves_none_behind(count):
    # The pool takes two, a worker seven: a file, two pipes, and two to find out whether it could be started.
    before = open_descriptors()
    with (
        free_descriptors(count),
        pytest.raises(UserError, match=r"did not start: Too many open files.*; raise .*ulimit -n"),
    ):
        ProcessPool(1).start()
    assert open_descriptors() == before


def test_no_folder_for_temporary_files_is_one_error_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"did not start: No such file.*gone.*; set TMPDIR"):
        ProcessPool(2).start()


def test_a_worker_killed_while_it_starts_is_an_error_with_a_fix(tmp_path, monkeypatch):
    (tmp_path / "killed_at_import.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"the worker ended: signal 9 \(SIGKILL\).*memory.*fewer workers"):
        ProcessPool(1, preload=("killed_at_import",)).start()


def test_a_worker_that_cannot_be_replaced_costs_the_call_and_the_next_one_gets_a_new_worker():
    with ProcessPool(1) as pool:
        os.kill(pool.run(os.getpid).value, signal.SIGKILL)
        time.sleep(0.1)
        with free_descriptors(0):  # the dead worker's three are given back before the new one is started
            outcome = pool.submit("operator:add", 1, 2).result(20)
        assert outcome.status == "died" and "could be started: Too many open files" in outcome.detail
        assert pool.submit("operator:add", 1, 2).result(20).value == 3


def test_no_descriptors_left_does_not_end_a_call():
    with ProcessPool(1) as pool:
        call = pool.submit("time:sleep", 0.5)
        with free_descriptors(0):
            assert call.result(20).status == "ok"


def test_a_function_that_a_worker_cannot_import_is_refused():
    with ProcessPool(1) as pool, pytest.raises(ValueError, match="cannot be imported"):
        pool.submit(lambda: 0)
