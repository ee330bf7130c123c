"""The benchmark's own parts: equal work for all engines, and tables that say what was measured."""

from pathlib import Path

import pytest

from tests.bench.engines import ENGINES, Engine, Process
from tests.bench.jaxsp_worker import Jaxsp
from tests.bench.limits import limits, products, step_bytes, step_flops
from tests.bench.results import agreement, growth, late_compilations, limit_table, ratio, speed, speed_table, table
from tests.bench.weights import write_float16
from tests.bench.worker import Outputs, Place, sampling
from tests.bench.workloads import (
    FIRST_TOKEN,
    Episode,
    Request,
    Workload,
    by_prompt_length,
    check_outputs,
    make_workloads,
    read_workloads,
    write_workloads,
)
from tests.tiny import write_tiny_gguf, write_tiny_model

VOCAB = 49_152
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": VOCAB,
}  # fmt: skip
WORKLOADS = make_workloads(0, VOCAB)


def test_one_seed_makes_the_same_workloads_and_a_file_keeps_them(tmp_path: Path) -> None:
    assert make_workloads(0, VOCAB) == WORKLOADS
    assert make_workloads(1, VOCAB) != WORKLOADS
    write_workloads(WORKLOADS, tmp_path / "workloads.json")
    assert read_workloads(tmp_path / "workloads.json") == WORKLOADS


@pytest.mark.parametrize(("name", "size"), [("batch_1", 1), ("batch_8", 8), ("batch_32", 32), ("batch_64", 64)])
def test_a_batch_has_prompts_and_outputs_of_128_tokens(name: str, size: int) -> None:
    workload = WORKLOADS[name]
    assert [(len(each.prompt), each.num_outputs) for each in workload.requests] == [(128, 128)] * size
    assert len({each.prompt for each in workload.requests}) == size
    assert workload.num_outputs == 128 * size and workload.lengths == [256] * size


def test_groups_are_four_prompts_eight_times_each() -> None:
    prompts = [each.prompt for each in WORKLOADS["groups"].requests]
    assert len(prompts) == 32 and sorted(map(prompts.count, set(prompts))) == [8] * 4


def test_ragged_requests_fill_their_ranges() -> None:
    requests = WORKLOADS["ragged"].requests
    prompts, outputs = [len(each.prompt) for each in requests], [each.num_outputs for each in requests]
    assert len(requests) == 96
    assert 32 <= min(prompts) < 48 and 480 < max(prompts) <= 512
    assert 16 <= min(outputs) < 32 and 240 < max(outputs) <= 256


def test_an_episode_has_ten_turns_of_60_observed_tokens() -> None:
    episodes = WORKLOADS["episodes"].episodes
    assert len(episodes) == 16
    assert all([len(each) for each in episode.observations] == [60] * 10 for episode in episodes)
    assert WORKLOADS["episodes"].lengths == [128 + 10 * (60 + 40)] * 16
    assert WORKLOADS["episodes"].num_outputs == 16 * 10 * 40


def test_ids_are_the_vocabularys_and_no_control_tokens() -> None:
    prompts = [each.prompt for workload in WORKLOADS.values() for each in workload.requests]
    tokens = {token for prompt in prompts for token in prompt}
    assert min(tokens) >= FIRST_TOKEN and max(tokens) < VOCAB


def test_a_trial_has_the_same_requests_with_fewer_outputs() -> None:
    trial = make_workloads(0, VOCAB, shrink=16)
    assert {name: len(each.requests) for name, each in trial.items()} == {
        name: len(each.requests) for name, each in WORKLOADS.items()
    }
    assert trial["batch_8"].num_outputs == 8 * 8


def test_batches_of_a_padding_engine_hold_every_request_once_and_like_lengths_together() -> None:
    requests = WORKLOADS["ragged"].requests
    batches = by_prompt_length(requests, 32)
    assert [len(batch) for batch in batches] == [32, 32, 32]
    assert sorted(index for batch in batches for index in batch) == list(range(96))
    longest = [max(len(requests[index].prompt) for index in batch) for batch in batches]
    shortest = [min(len(requests[index].prompt) for index in batch) for batch in batches]
    assert all(before <= after for before, after in zip(longest, shortest[1:], strict=False))


def test_outputs_of_another_length_are_refused() -> None:
    workload = Workload("w", "w", (Request((1, 2), 3), Request((1,), 1)))
    check_outputs(workload, [[7, 7, 7], [7]])
    with pytest.raises(ValueError, match=r"w: 2 outputs instead of 2, .*\[\(2, 3\)\]"):
        check_outputs(workload, [[7, 7], [7]])
    with pytest.raises(ValueError, match="1 outputs instead of 2"):
        check_outputs(workload, [[7, 7, 7]])


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_step_reads_every_weight_of_smollm2_once_and_its_cache() -> None:
    num_weights = sum(product.num_weights for product in products(SMOLLM2))
    assert num_weights == 134_515_008 - 61 * 576  # its published size without the norms
    kv_bytes = 30 * 2 * 3 * 64 * 4
    assert step_bytes(SMOLLM2, rows=8, context=100) == 4 * num_weights + 8 * 100 * kv_bytes
    assert step_flops(SMOLLM2, rows=8, context=0) == 2 * 8 * num_weights


def test_limits_are_what_the_machine_moves_and_computes_over_what_a_step_needs() -> None:
    measured = {
        "copy_numpy_bytes_per_s": 1e10, "update_xla_bytes_per_s": 4e10, "read_numpy_bytes_per_s": 2e10,
        "products_flops_per_s": 1e11, "square_flops_per_s": 2e11,
    }  # fmt: skip
    found = limits(SMOLLM2, 32, 192.5, measured)
    assert found.bandwidth == pytest.approx(32 * 4e10 / step_bytes(SMOLLM2, 32, 192.5))
    assert found.read == pytest.approx(found.bandwidth / 2)
    assert found.matrix == pytest.approx(32 * 1e11 / step_flops(SMOLLM2, 32, 192.5))
    assert found.square == pytest.approx(2 * found.matrix)
    assert 70 < limits(SMOLLM2, 1, 0, measured).bandwidth < 80  # 40 GB/s over 0.54 GB


# Results -------------------------------------------------------------------------------------------------------------


def row(engine: str, tokens_per_s: float, workload: str = "batch_8", **more) -> dict:
    return {"engine": engine, "workload": workload, "tokens_per_s": tokens_per_s, **more}


ROWS = [
    row("jaxsp", 100.0, num_compilations=[5, 5]),
    row("transformers", 50.0),
    row("jaxsp", 120.0, num_compilations=[5, 5]),
    row("transformers", 40.0),
    row("jaxsp", 110.0, num_compilations=[5, 7]),
    {"engine": "tunix", "workload": "batch_8", "error": "ValueError: no"},
]


def test_speeds_are_medians_with_the_best_and_ratios_are_of_medians() -> None:
    found = speed(ROWS, "jaxsp", "batch_8")
    assert found is not None and (found.median, found.best, found.num_repeats) == (110.0, 120.0, 3)
    assert ratio(ROWS, "transformers", "batch_8") == pytest.approx(110 / 45)
    assert speed(ROWS, "tunix", "batch_8") is None and ratio(ROWS, "tunix", "batch_8") is None


def test_what_is_compiled_between_the_first_and_the_last_repeat_is_late() -> None:
    assert late_compilations(ROWS, "batch_8") == 2
    assert late_compilations(ROWS[:3], "batch_8") == 0
    assert late_compilations(ROWS, "batch_1") is None


def test_the_table_names_speeds_targets_and_errors() -> None:
    text = speed_table(ROWS, [WORKLOADS["greedy"], WORKLOADS["batch_8"]], ["transformers", "tunix", "llama.cpp"])
    header, _, line, *rest = text.splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "workload", "jaxsp", "transformers", "tunix", "llama.cpp", "vs transformers", "vs tunix", "vs llama.cpp",
        "compiled late",
    ]  # fmt: skip
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "prompt 128 + 128, batch 8", "110.0 (120.0, 3)", "45.0 (50.0, 2)", "error 1", "-", "2.44x (MISSES 2.5x)", "-",
        "-", "2",
    ]  # fmt: skip
    assert rest == ["", "error 1: tunix: ValueError: no"]


def test_a_share_of_a_limit_is_the_decoding_speeds() -> None:
    workload = WORKLOADS["batch_1"]
    measured = {
        "copy_xla_bytes_per_s": 4e10, "read_numpy_bytes_per_s": 5e10, "products_flops_per_s": 1e11,
        "square_flops_per_s": 2e11,
    }  # fmt: skip
    rows = [
        row("jaxsp", 50.0, "batch_1", details={"sampler/decode_s": 2.0}),
        {"engine": "machine", "workload": "batch_1", "details": measured},
    ]
    text = limit_table(rows, [workload], SMOLLM2)
    limit = limits(SMOLLM2, 1, 192.5, measured).bandwidth
    line = next(line for line in text.splitlines() if "updated in place (40.0 GB/s)" in line)
    assert f"{limit:.1f}" in line and f"{63.5 / limit:.0%} (reaches 75%)" in line and f"{50 / limit:.0%}" in line
    assert limit_table([], [workload], SMOLLM2) == "no limits: the machine or jaxsp was not measured"


def test_growth_and_agreement_are_said_in_a_line() -> None:
    rows = [row("jaxsp", speed, f"batch_{size}") for size, speed in ((1, 10.0), (8, 50.0), (32, 40.0))]
    assert "they DO NOT GROW" in growth(rows, list(WORKLOADS.values()))
    assert growth(rows[:2], list(WORKLOADS.values())) == "tokens/s by batch: 1: 10.0, 8: 50.0; they grow throughout"
    greedy = [row("jaxsp", 1.0, "greedy", tokens=[[1, 2, 3]]), row("tunix", 1.0, "greedy", tokens=[[1, 2, 4]])]
    assert agreement(greedy) == "first greedy tokens equal to ours: tunix 2 of 3"


def test_tables_are_aligned() -> None:
    assert table(["a", "bb"], [["xyz", "1"]]).splitlines() == ["| a   | bb |", "|-----|---:|", "| xyz |  1 |"]


# Engines -------------------------------------------------------------------------------------------------------------


def test_every_engine_runs_workloads_that_exist_and_its_script_does() -> None:
    for engine in ENGINES:
        assert set(engine.expected_s) <= set(WORKLOADS)
        assert engine.module or Path(engine.command()[1]).exists()
    assert set(ENGINES[0].expected_s) == set(WORKLOADS)


def test_a_process_that_dies_is_an_error_and_not_an_exception(tmp_path: Path) -> None:
    process = Process(Engine("none", {}, module="tests.bench.no_such_module"), [], tmp_path / "log", 1)
    assert "its process ended with code 1" in process.ask(None, timeout_s=60)["error"]
    assert "its process ended" in process.ask({"verb": "run", "workload": "batch_1"}, timeout_s=60)["error"]
    assert "no_such_module" in (tmp_path / "log").read_text()


class Scripted:
    """A sampler that says which verbs it was called with, and samples zeros."""

    def __init__(self, missing: int = 0) -> None:
        self.prepared: list[str] = []
        self._missing = missing

    def prepare(self, workload: Workload) -> None:
        self.prepared.append(workload.name)

    def run(self, workload: Workload) -> Outputs:
        return Outputs([[0] * (length - self._missing) for length in workload.output_lengths], {"how": "so"})

    def num_compilations(self) -> int | None:
        return 3


def test_a_measured_run_is_timed_and_its_outputs_are_counted() -> None:
    sampler = Scripted()
    handle = sampling(sampler)
    handle("prepare", WORKLOADS["batch_8"])
    found = handle("run", WORKLOADS["batch_8"])
    assert sampler.prepared == ["batch_8"]
    assert found["tokens_per_s"] == pytest.approx(1024 / found["seconds"])
    assert (found["num_compilations"], found["details"]) == ([3, 3], {"how": "so"})
    with pytest.raises(ValueError, match="of wrong length"):
        sampling(Scripted(missing=1))("run", WORKLOADS["batch_8"])


def test_our_sampler_plays_episodes_and_compiles_nothing_once_prepared(tmp_path: Path) -> None:
    workload = Workload(
        "tiny",
        "tiny",
        (Request((5, 6, 7), 3),),
        (Episode((5, 6), ((7, 8, 9), (10,)), 4), Episode((9,), ((8,), (7,)), 4)),
    )
    sampler = Jaxsp(Place(write_tiny_model(tmp_path / "model"), tmp_path / "none.gguf", 1))
    handle = sampling(sampler)
    handle("prepare", workload)
    counts = [handle("run", workload)["num_compilations"] for _ in range(2)]
    assert len({count for pair in counts for count in pair}) == 1
    assert sampler.run(workload).tokens == sampler.run(workload).tokens


def test_the_float16_file_has_every_value_rounded_once(tmp_path: Path) -> None:
    import numpy as np

    from jaxsp.model.source import load_params, open_model

    source = write_tiny_gguf(tmp_path / "source.gguf")
    write_float16(source, tmp_path / "half.gguf")
    before, after = (open_model(str(path)) for path in (source, tmp_path / "half.gguf"))
    assert after.sizes == before.sizes
    embed, rounded = (load_params(model)["embed"] for model in (before, after))
    np.testing.assert_array_equal(np.asarray(embed).astype(np.float16).astype(np.float32), np.asarray(rounded))
