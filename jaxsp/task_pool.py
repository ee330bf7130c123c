"""Every task that was proposed, with where it came from and how it was solved, as rows of an SQLite file.

The file is for users too: `sqlite3 tasks.sqlite "select reason, count(*) from tasks group by reason"`. Its table `uses`
says in which steps a task trained the policy. A run of several processes has one file for each of them
(`task_pool_path`).
"""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Self

from jaxsp.config import UserError
from jaxsp.trajectory import Task

FORMAT_VERSION = 2
_APPLICATION_ID = 0x6A787370  # "jxsp", in SQLite's header: tells a task pool from any other SQLite file

_SCHEMA = (
    """create table tasks (
        task_id text primary key, text text not null, answer text not null, answer_type text not null,
        role text not null, step integer not null, policy_version integer not null, source text not null,
        is_valid integer not null, reason text not null, solve_rate real)""",
    "create index tasks_by_step on tasks (step)",
    # In which steps a task trained the policy.
    """create table uses (
        task_id text not null references tasks on delete cascade, step integer not null,
        primary key (task_id, step)) without rowid""",
    f"pragma application_id = {_APPLICATION_ID}",
    f"pragma user_version = {FORMAT_VERSION}",
)
_TASK_COLUMNS = tuple(field.name for field in fields(Task))
_FIXES = {
    "SQLITE_NOTADB": "is not a task pool (no SQLite file); move it away or name another file",
    "SQLITE_CORRUPT": "is damaged; restore it from a copy, or move it away to begin an empty one",
    "SQLITE_BUSY": "is locked by another program; close that program and resume",
    "SQLITE_LOCKED": "is locked by another program; close that program and resume",
    "SQLITE_FULL": "cannot grow, its disk is full; free space and resume",
    "SQLITE_CANTOPEN": "cannot be opened; check that it is a file and its permissions",
    "SQLITE_READONLY": "cannot be written; mend its permissions",
    "SQLITE_IOERR": "cannot be read or written, its disk refuses; free space there or mend the disk, and resume",
}


def task_pool_path(run_dir: str | Path, process_index: int = 0) -> Path:
    """`tasks.sqlite` for the first process, `tasks-1.sqlite` and so on for the others."""
    return Path(run_dir) / (f"tasks-{process_index}.sqlite" if process_index else "tasks.sqlite")


class TaskPool:
    """An open task pool, made if the file does not exist.

    Each method is one transaction; `with pool.transaction():` makes one of several, for all that a step changes. A
    transaction that was not committed when the process was killed is as if it never was. Others may read meanwhile
    (SQLite's write-ahead log).

    Args:
        path: the SQLite file; see `task_pool_path`.
        lock_timeout_s: how long to wait for another program that holds the file.

    Raises:
        UserError: the file is not a task pool, is of another format version, is locked, or cannot be written.
    """

    def __init__(self, path: str | Path, lock_timeout_s: float = 10.0) -> None:
        self._path = Path(path)
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=lock_timeout_s, isolation_level=None)
        try:
            with self._errors():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def add(self, tasks: Iterable[Task]) -> None:
        """Adds the tasks, in order. Raises ValueError if a `task_id` is in the pool already; then none is added."""
        columns = ", ".join(_TASK_COLUMNS)
        marks = ", ".join("?" * len(_TASK_COLUMNS))
        with self.transaction():
            try:
                self._database.executemany(
                    f"insert into tasks ({columns}) values ({marks})", (astuple(task) for task in tasks)
                )
            except sqlite3.IntegrityError as error:
                raise ValueError(f"task pool {self._path}: {error}; task ids are unique in a run") from error

    def record_uses(self, task_ids: Iterable[str], step: int) -> None:
        """Records that the tasks were trained on in `step`. Raises ValueError if one is not in the pool."""
        with self.transaction():
            try:
                self._database.executemany("insert into uses values (?, ?)", ((task_id, step) for task_id in task_ids))
            except sqlite3.IntegrityError as error:
                raise ValueError(
                    f"task pool {self._path}: {error}: a use is of a task in the pool, once a step"
                ) from error

    def tasks(self, step: int | None = None, is_valid: bool | None = None) -> list[Task]:
        """The tasks in the order they were added; of one step, and only valid or invalid ones, where given."""
        with self._errors():
            rows = self._database.execute(
                f"select {', '.join(_TASK_COLUMNS)} from tasks "
                "where (:step is null or step = :step) and (:is_valid is null or is_valid = :is_valid) order by rowid",
                {"step": step, "is_valid": is_valid},
            ).fetchall()
        tasks = (Task(*row) for row in rows)
        return [replace(task, is_valid=bool(task.is_valid)) for task in tasks]  # SQLite holds it as 0 or 1

    def drop_after(self, step: int) -> int:
        """Makes the pool as it was after `step`: later tasks and uses go. Returns how many tasks went."""
        with self.transaction():
            self._database.execute("delete from uses where step > ?", (step,))
            return self._database.execute("delete from tasks where step > ?", (step,)).rowcount

    def __len__(self) -> int:
        with self._errors():
            return self._database.execute("select count(*) from tasks").fetchone()[0]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes in the block are committed together, or none if it raises. An inner block joins the outer one."""
        with self._errors():
            if self._database.in_transaction:
                yield
                return
            self._database.execute("begin immediate")
            try:
                yield
                self._database.execute("commit")
            except BaseException:
                if self._database.in_transaction:  # some errors have rolled back already
                    self._database.execute("rollback")
                raise

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Makes the tables of a new file, or checks that an old one is a task pool."""
        self._database.execute("pragma foreign_keys = on")
        self._database.execute("begin")  # one view for all that `_is_ours` looks at
        is_ours = self._is_ours()
        self._database.execute("rollback")
        if not is_ours:
            self._database.execute("begin immediate")
            if not self._is_ours():  # another program may have made the tables since
                for statement in _SCHEMA:
                    self._database.execute(statement)
            self._database.execute("commit")
        # Lets others read while a step is written. A program that opens the file at this moment may be in the way,
        # without a wait; then that program sets it, for the mode belongs to the file.
        with contextlib.suppress(sqlite3.OperationalError):
            self._database.execute("pragma journal_mode = wal")
        self._database.execute("pragma synchronous = full")  # one commit a step: safe against power loss, still cheap

    def _is_ours(self) -> bool:
        """True for a task pool, False for an empty file; raises for anything else."""
        application_id, version, num_tables = (
            self._database.execute(query).fetchone()[0]
            for query in ("pragma application_id", "pragma user_version", "select count(*) from sqlite_schema")
        )
        if application_id == 0 and version == 0 and num_tables == 0:
            return False
        if application_id != _APPLICATION_ID:
            raise UserError(f"{self._path} is an SQLite file but not a task pool; move it away or name another file")
        if version != FORMAT_VERSION:
            raise UserError(
                f"task pool {self._path} has format {version}, this program reads format {FORMAT_VERSION}; "
                "open it with the version that wrote it"
            )
        return True

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what the user can mend into one message that names the file."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            for prefix, fix in _FIXES.items():
                if name.startswith(prefix):
                    raise UserError(f"task pool {self._path} {fix}") from error
            raise
        except OSError as error:
            raise UserError(f"task pool {self._path} cannot be made: {error.strerror or error}") from error
