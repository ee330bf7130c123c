"""Metrics and episodes: what a reader of the run directory finds, also after a kill and a resume."""

import gzip
import json
import math
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxsp.config import UserError
from jaxsp.metrics import EpisodeLog, MetricsWriter, read_metrics


def tensorboard_points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run_dir / "tb"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_scalars_are_read_back_by_tensorboard_and_from_the_json_lines(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"reasoner/reward": step / 4, "time/play_s": np.float32(1.5)})
            assert len(read_metrics(tmp_path)) == step + 1, "a row is on disk once written"
    assert tensorboard_points(tmp_path, "reasoner/reward") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert tensorboard_points(tmp_path, "time/play_s") == [(0, 1.5), (1, 1.5), (2, 1.5)]
    rows = read_metrics(tmp_path)
    assert [list(row) for row in rows] == [["step", "time_s", "reasoner/reward", "time/play_s"]] * 3
    assert abs(rows[-1]["time_s"] - time.time()) < 60
    assert [row["reasoner/reward"] for row in rows] == [0.0, 0.25, 0.5]


def test_plotted_scalars_go_to_tensorboard_alone(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.plot(4, {"evaluation/accuracy_frac": 0.5})
        with pytest.raises(ValueError, match="part/what"):
            writer.plot(4, {"accuracy": 0.5})
    assert tensorboard_points(tmp_path, "evaluation/accuracy_frac") == [(4, 0.5)] and read_metrics(tmp_path) == []


def test_nan_and_infinity_are_null_in_json_and_no_point_in_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a/b": math.nan, "a/c": 1.0})
        writer.write(1, {"a/b": 2.0, "a/c": -math.inf})
    assert [(row["a/b"], row["a/c"]) for row in read_metrics(tmp_path)] == [(None, 1.0), (2.0, None)]
    assert tensorboard_points(tmp_path, "a/b") == [(1, 2.0)]
    assert tensorboard_points(tmp_path, "a/c") == [(0, 1.0)]


def test_resuming_drops_later_rows_from_both_and_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.write(step, {"a/b": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time_s": 1.0, "a/')  # what a kill in the middle of a write leaves
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(3, {"a/b": 30.0})
    assert [(row["step"], row["a/b"]) for row in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert tensorboard_points(tmp_path, "a/b") == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert len(list((tmp_path / "tb").iterdir())) == 2, "the second writer opened a file of its own"
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("name", ["reward", "Reasoner/reward", "reasoner/", "/reward", "a/b c", "a//b"])
def test_a_name_that_is_not_part_and_what_is_refused(tmp_path, name):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="part/what"):
        writer.write(0, {name: 1.0})
    assert read_metrics(tmp_path) == []


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        MetricsWriter(tmp_path, resume_step=1)


def test_a_run_directory_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        MetricsWriter(tmp_path / "file" / "run")


@pytest.fixture
def full_disk():
    """Files cannot grow beyond 4 kB; called, it lifts that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_the_message_of_the_write_and_closes_both_files(tmp_path, full_disk):
    with pytest.raises(UserError, match=r"cannot write .*free space") as error, MetricsWriter(tmp_path) as writer:
        for step in range(100):  # rows that the file's buffer keeps after it could not write them
            writer.write(step, {f"a/b{index}": math.nan for index in range(20)})
    full_disk()
    assert error.value.__context__ is error.value.__cause__, "no error of the closing stands in between"
    assert [entry for entry in os.listdir("/proc/self/fd") if is_inside(entry, tmp_path)] == []


def test_an_error_of_the_closing_alone_is_a_message_too(tmp_path, full_disk):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        for step in range(100):
            writer.plot(step, {f"a/b{index}": 1.0 for index in range(20)})
    with pytest.raises(UserError, match=r"cannot write .*free space"):
        writer.close()
    full_disk()
    assert [entry for entry in os.listdir("/proc/self/fd") if is_inside(entry, tmp_path)] == []


def is_inside(descriptor: str, folder: Path) -> bool:
    link = f"/proc/self/fd/{descriptor}"
    return os.path.lexists(link) and os.readlink(link).startswith(str(folder))


@pytest.mark.parametrize(
    "line",
    [
        "1",
        "{}",
        '{"step": "3"}',
        '{"step": 1.5}',
        '{"step": 1e400}',
        '{"step": 3, "a/b": "text"}',
        '{"step": 3, "a/b": 1e400}',
        '{"step": 3, "a/b": NaN}',
        f'{{"step": 3, "a/b": {10**400}}}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:24],
)
def test_a_line_of_no_numbers_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "a/b": null}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a row of this file; mend or delete that line"):
        read_metrics(tmp_path)


def test_a_folder_in_the_place_of_the_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read: Is a directory"):
        read_metrics(tmp_path)


def test_episodes_are_equal_bytes_for_equal_rows_and_come_back(tmp_path):
    rows = [
        {"role": "reasoner", "text": "½ + ½ = 1\n<|im_end|>", "reward": np.float32(0.5), "tokens": np.arange(3)},
        {"role": "challenger", "text": "", "reward": math.nan, "parts": {"valid": np.bool_(True)}},
    ]
    log = EpisodeLog(tmp_path)
    path = log.write(12, rows)
    first = path.read_bytes()
    time.sleep(1.1)  # gzip's own time stamp has a resolution of one second
    assert log.write(12, rows).read_bytes() == first
    assert path == tmp_path / "episodes" / "step_000012.jsonl.gz"
    assert log.read(12) == [
        {"role": "reasoner", "text": "½ + ½ = 1\n<|im_end|>", "reward": 0.5, "tokens": [0, 1, 2]},
        {"role": "challenger", "text": "", "reward": None, "parts": {"valid": True}},
    ]
    with gzip.open(path, "rt", encoding="utf-8") as file:
        assert [json.loads(line)["role"] for line in file] == ["reasoner", "challenger"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "no partial file is left"


def test_resuming_drops_later_episodes_of_this_process_alone(tmp_path):
    logs = [EpisodeLog(tmp_path), EpisodeLog(tmp_path, process_index=1)]
    for step in range(4):
        for log in logs:
            log.write(step, [{"step": step}])
    assert logs[1].drop_after(1) == 2
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == [
        "step_000000-1.jsonl.gz",
        "step_000000.jsonl.gz",
        "step_000001-1.jsonl.gz",
        "step_000001.jsonl.gz",
        "step_000002.jsonl.gz",
        "step_000003.jsonl.gz",
    ]


def test_a_damaged_episode_file_is_named(tmp_path):
    log = EpisodeLog(tmp_path)
    path = log.write(0, [{"a": "b" * 1000}])
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match=r"step_000000\.jsonl\.gz"):
        log.read(0)
