"""Benchmarks measure what they say: their figures against counts and clocks of their own."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fakes import FakeRunner
from safetensors import safe_open
from tiny import save_tiny_checkpoint, tiny_tokenizer

from streamkv.bench import blocks, kernels, offline, peaks, profile, report, startup
from streamkv.bench.load import Load, closed_loop, measure
from streamkv.bench.options import BlocksConfig, KernelsConfig, LoadConfig, OfflineConfig
from streamkv.bench.throughput import loads_of
from streamkv.cli import main
from streamkv.config import EngineConfig
from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import ConfigError, StreamkvError
from streamkv.models import build_model
from streamkv.ops import VOCABULARY, extension
from streamkv.ops.extension import load_extension
from streamkv.protocol import StepInput, StepOutput, unpack_ints
from streamkv.runner.cost import Cost
from streamkv.runner.formats import Matrix, ModelFormats
from streamkv.runner.inputs import resolve_inputs
from streamkv.runner.recorder import Recorder

LLAMA_OPS = {*VOCABULARY} - {"head_rms_norm"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny"
    return save_tiny_checkpoint(path, hidden_size=64)  # heads of 16


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


class CountingRunner(FakeRunner):
    """Knows the most rows that ran in one step."""

    most_rows = 0

    def step(self, step: StepInput) -> StepOutput:
        self.most_rows = max(self.most_rows, len(unpack_ints(step.scheduled)) // 4)
        return super().step(step)


def with_engine(function: Any) -> tuple[CountingRunner, Any]:
    runner = CountingRunner(vocab_size=339, max_model_len=512, num_blocks=1024, block_size=16)

    async def run() -> Any:
        async with AsyncEngine("fake", runner=runner, tokenizer=tiny_tokenizer()) as engine:
            return await function(engine)

    return runner, asyncio.run(run())


# --- closed loops --------------------------------------------------------------------------------


def test_a_closed_loop_computes_its_tokens_with_so_many_streams():
    async def run(engine: AsyncEngine) -> Any:
        figures = await closed_loop(engine, Load(3, 20, 7, 0, 9), "seed")
        return figures, engine.stats()

    runner, (figures, stats) = with_engine(run)
    assert stats.generation_tokens_total == 9 * 7 and stats.prompt_tokens_total == 9 * 20
    assert runner.most_rows == 3
    assert figures["tokens_per_s"] * 20 == pytest.approx(figures["prompt_tokens_per_s"] * 7)
    assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p90_ms"] <= figures["ttft_p99_ms"]
    assert 0 < figures["itl_p50_ms"] <= figures["itl_p99_ms"] <= figures["itl_max_ms"]
    assert figures["cached_tokens"] == 0


def test_a_shared_prefix_is_found_in_the_cache_by_all_but_the_first():
    _, figures = with_engine(lambda engine: closed_loop(engine, Load(1, 40, 2, 32, 4), "seed"))
    assert figures["cached_tokens"] == 32 * 3 / 4


def test_no_round_finds_prompts_of_another():
    load = Load(2, 64, 2, 0, 4)
    _, rounds = with_engine(lambda engine: measure(engine, [load], 3, "seed"))
    # Of 339 tokens some prompts begin with the same one or two.
    assert all(one["cached_tokens"] <= 1 for one in rounds[load.name])


def test_loads_are_all_combinations():
    options = LoadConfig(concurrency=(1, 4), input_len=(8, 16), output_len=3, requests_per_stream=5)
    loads = loads_of(options)
    assert {(load.concurrency, load.input_len) for load in loads} == {
        (1, 8),
        (4, 8),
        (1, 16),
        (4, 16),
    }
    assert all(load.num_requests == 5 * load.concurrency for load in loads)


def test_a_prefix_as_long_as_the_prompt_is_wrong_usage(capsys):
    command = ["bench", "throughput", "--input-len", "32", "--shared-prefix-len", "32"]
    assert main(command) == 2
    assert "--shared-prefix-len: expected less than --input-len, 32, got 32" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_a_model_is_measured_from_the_command_line(benchmark, checkpoint, capsys):
    load = ["--concurrency", "2", "--input-len", "24", "--output-len", "5", "--rounds", "2"]
    assert main(["bench", benchmark, str(checkpoint), *load]) == 0
    got = last_line(capsys)
    assert got["benchmark"] == benchmark and len(got["rounds"]["2 x 24 in, 5 out"]) == 2
    assert got["medians"]["2 x 24 in, 5 out"]["tokens_per_s"] > 0
    assert got["model"]["max_model_len"] == 256


def test_a_prompt_beyond_the_context_is_one_line(checkpoint, capsys):
    assert main(["bench", "throughput", str(checkpoint), "--input-len", "9999"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# --- batches -------------------------------------------------------------------------------------


def test_each_way_gets_the_same_prompts_in_each_round_and_new_ones_in_the_next():
    seen: dict[str, list[Any]] = {"ours": [], "theirs": []}

    def way(name: str) -> offline.Generate:
        def generate(prompts: Any, num_tokens: int) -> int:
            seen[name].append(prompts)
            return len(prompts) * num_tokens

        return generate

    options = OfflineConfig(num_prompts=3, input_len=5, output_len=4, rounds=2, prompt_seed=1)
    rounds = offline.measure({name: way(name) for name in seen}, options, 99)
    assert seen["ours"] == seen["theirs"]
    first, *measured = seen["ours"]
    assert [len(prompts) for prompts in measured] == [3, 3] and len(first) == 2
    distinct = {tuple(prompt) for prompts in seen["ours"] for prompt in prompts}
    assert len(distinct) == 8 and {len(prompt) for prompt in distinct} == {5}
    for figures in (*rounds["ours"], *rounds["theirs"]):
        assert figures["tokens_per_s"] * figures["seconds"] == pytest.approx(12)
        assert figures["prompt_tokens_per_s"] * figures["seconds"] == pytest.approx(15)


def test_a_way_that_gives_fewer_tokens_is_no_measurement():
    with pytest.raises(StreamkvError, match="expected 50 x 64 tokens, got 7"):
        offline.measure({"ours": lambda prompts, num: 7}, OfflineConfig(), 99)


def test_batches_are_measured_from_the_command_line_beside_transformers(checkpoint, capsys):
    load = ["--num-prompts", "3", "--input-len", "9", "--output-len", "5", "--rounds", "2"]
    blocks = ["--num-gpu-blocks-override", "64"]
    assert main(["bench", "offline", str(checkpoint), *load, *blocks, "--transformers"]) == 0
    got = last_line(capsys)
    ours, theirs = got["medians"].values()
    assert ours["times_transformers"] == pytest.approx(
        ours["tokens_per_s"] / theirs["tokens_per_s"], rel=1e-4
    )
    assert [len(figures) for figures in got["rounds"].values()] == [2, 2]


def test_transformers_is_not_asked_for_what_it_can_not_read(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert main(["bench", "offline", str(file), "--transformers"]) == 2
    assert "--transformers: expected a folder in Hugging Face format" in capsys.readouterr().err


# --- start-up ------------------------------------------------------------------------------------


def test_a_fresh_process_gives_its_moments_in_order_and_its_memory(checkpoint, capsys):
    assert main(["bench", "startup", str(checkpoint), "--runs", "1"]) == 0
    (once,) = last_line(capsys)["rounds"]
    parts = [once[f"{part}_s"] for part in ("python", "imports", "load", "first_answer")]
    assert min(parts) > 0
    assert once["first_token_s"] == pytest.approx(sum(parts), rel=1e-4)
    assert once["peak_rss_mib"] > once["weights_mib"] > 0


def test_a_process_that_fails_says_why(tmp_path):
    config = EngineConfig(model=str(tmp_path / "nothing.gguf"))
    with pytest.raises(StreamkvError, match="fresh process ended with 1: .*nothing.gguf") as raised:
        startup.start_once(config, 4)
    assert "ModelLoadError" not in str(raised.value)


# --- profiles ------------------------------------------------------------------------------------


class RecordedBatch(NamedTuple):
    token_ids: Any
    positions: Any
    slots: Any
    query_start: Any
    context_lens: Any
    block_tables: Any
    logit_rows: Any


class RecordingCpu:
    Batch = RecordedBatch


def test_a_steps_batch_gives_each_row_blocks_of_its_own_and_the_end_of_its_context():
    step = profile.Step("step", ((1, 33), (5, 5), (3, 20)))
    formats = ModelFormats({}, "float32")
    profiled = profile.Profiled(RecordingCpu, None, None, None, formats, 50, 16)
    batch = profile.make_batch(profiled, step)
    assert batch.positions.tolist() == [32, 0, 1, 2, 3, 4, 17, 18, 19]
    assert batch.query_start.tolist() == [0, 1, 6, 9] and batch.context_lens.tolist() == [33, 5, 20]
    assert batch.logit_rows.tolist() == [0, 5, 8]
    used = [table[: -(-context // 16)] for table, (_, context) in zip(
        batch.block_tables.tolist(), step.rows, strict=True
    )]  # fmt: skip
    assert used == [[0, 1, 2], [3], [4, 5]] and step.num_blocks(16) == 6
    blocks = [used[row][p // 16] for row, p in zip([0] + [1] * 5 + [2] * 3, batch.positions)]  # noqa: B905
    assert batch.slots.tolist() == [
        block * 16 + p % 16 for block, p in zip(blocks, batch.positions, strict=True)
    ]
    assert all(array.dtype == np.int32 for array in batch)


LIMITS = peaks.Peaks(
    fma=100.0, bf16_dot=200.0, int8_dot=400.0, memory=10.0, shared_cache=99.0, own_cache=20.0
)


def test_an_op_is_limited_by_the_tightest_of_memory_cache_and_arithmetic():
    read, compute = Cost(100, 1), Cost(1, 1000)
    assert profile.limit_s("linear", read, LIMITS, "float32") == 10
    assert profile.limit_s("rms_norm", read, LIMITS, "float32") == 5
    assert profile.limit_s("linear", compute, LIMITS, "float32") == 10
    assert profile.limit_s("linear", compute, LIMITS, "bfloat16") == 5
    assert profile.limit_s("linear", compute, LIMITS, "int8") == 2.5
    without = LIMITS._replace(bf16_dot=0.0)
    assert profile.limit_s("linear", compute, without, "bfloat16") == 10


def test_a_product_is_limited_by_the_arithmetic_of_its_own_inputs():
    model = build_model(kernels.model_config("small"))
    matrices = {
        one.name: Matrix(("some",), 0, "bfloat16" if "mlp" in one.name else "int8")
        for one in model.parameters()
        if len(one.shape) == 2
    }
    spec = resolve_inputs(Recorder(max_model_len=64).record(model), matrices)
    formats = ModelFormats(matrices, "bfloat16")
    profiled = profile.Profiled(RecordingCpu, None, spec, None, formats, 49152, 16)
    step = profile.prompt_step(64)
    free = LIMITS._replace(memory=1e99, own_cache=1e99)
    bounds = profile.step_bounds(profiled, step, free)
    head = bounds["linear", "model.embed_tokens"]
    assert head.cost.num_operations == 2 * 49152 * 576
    assert head.least_s == pytest.approx(2 * 49152 * 576 / free.int8_dot)
    down = bounds["linear", "model.layers.*.mlp.down_proj"]
    operations = 2 * 576 * 1536 * (29 * 64 + 1)  # of the last layer, one row alone goes on
    assert down.cost.num_operations == operations
    assert down.least_s == pytest.approx(operations / free.bf16_dot)
    attention = bounds["paged_attention", "9/3 heads of 64"]
    assert attention.least_s == pytest.approx(attention.cost.num_operations / free.fma)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles in a moment."""
    monkeypatch.setattr(profile, "ROUND_S", 0.002)
    monkeypatch.setattr(peaks, "MEMORY_BYTES", 4 << 20)
    monkeypatch.setitem(kernels.SHAPES["small"], "num_hidden_layers", 2)


@pytest.mark.parametrize(
    "wish",
    [
        ["--dtype", "bfloat16"],
        ["--dtype", "float32"],
        ["--weight-format", "Q4_1", "--kv-cache-dtype", "int8"],
        ["--weight-format", "int8"],
    ],
)
def test_every_op_is_profiled_in_every_step(wish, quick, capsys):
    steps = ["--decode-rows", "1", "3", "--prompt-len", "20", "--context", "40"]
    assert main(["bench", "kernels", *wish, "--rounds", "2", *steps]) == 0
    got = last_line(capsys)
    assert len(got["steps"]) == 3
    for ops in got["steps"].values():
        assert {name.split()[0] for name in ops} == {*LLAMA_OPS, "all"}
        whole = ops.pop("all")
        assert sum(one["us"] for one in ops.values()) == pytest.approx(whole["us"], rel=1e-4)
        assert sum(one["% of step"] for one in ops.values()) == pytest.approx(100, rel=1e-4)
        assert all(one["us"] > 0 for one in ops.values())
    # The head of one row: 49152 x 576 products and a sum for each, whatever the clock says.
    head = next(one for name, one in ops.items() if "linear model.embed" in name)
    assert head["GFLOP/s"] * head["us"] * 1e3 == pytest.approx(2 * 49152 * 576, rel=1e-4)


def test_a_program_is_profiled_for_what_its_ops_take():
    """The parts add up to a run timed from outside, within what its own clock may lose."""
    options = KernelsConfig(decode_rows=(2,), prompt_len=(), threads=1)
    steps = profile.steps_of(options)
    profiled = kernels.build(load_extension(), options, steps)
    batch = profile.make_batch(profiled, steps[0])
    times = []
    for _ in range(5):
        inside_s = sum(profile.time_step(profiled, steps[0]).values())
        for _ in range(3):
            started_s = time.perf_counter()
            profiled.program.run(batch, profiled.team)
            times.append((time.perf_counter() - started_s) / inside_s)
    assert 0.5 < float(np.median(times)) < 2


def test_peaks_are_found_and_nonsense_is_refused(quick):
    cpu = load_extension()
    team = cpu.Team(1)
    measured = peaks.measure_peaks(cpu, team, seconds=0.005)
    assert min(measured.fma, measured.int8_dot) > 1e9
    assert min(measured.memory, measured.shared_cache) > 1e8
    assert (measured.bf16_dot > 0) == (cpu.isa() == "avx512_bf16")
    for bad in ((4096, 100, 1), (4096, 8192, 1), (4096, 512, 0)):
        with pytest.raises(ValueError, match="read: expected chunk_bytes"):
            cpu.peaks.read(team, *bad, 0.001)


def test_a_peak_is_the_best_of_several_measurements_between_the_steps(quick, monkeypatch):
    events: list[str] = []
    found = iter([1e9, 9e9, 2e9, 3e9, 4e9])
    monkeypatch.setattr(
        profile,
        "measure_peaks",
        lambda cpu, team: events.append("peaks") or peaks.Peaks(*[next(found)] * 6),
    )
    measure_step = profile.time_step
    monkeypatch.setattr(profile, "time_step", lambda *a: events.append("step") or measure_step(*a))
    steps = [profile.decode_step(1, 20), profile.prompt_step(4)]
    options = KernelsConfig(decode_rows=(1,), prompt_len=(4,), threads=1)
    profiled = kernels.build(load_extension(), options, steps)
    assert profile.profile(profiled, steps, 1).peaks.fma == 9e9
    assert events == ["peaks", "step", "peaks", "step", "peaks"]


def test_a_kernel_beyond_its_limit_is_said_to_be_a_disturbed_measurement(capsys):
    limits = LIMITS._replace(fma=1e11, bf16_dot=0.0)
    for share, is_said in ((104.0, False), (298.7, True)):
        measured = profile.Profile(limits, {"step": [("op", {"% of limit": share})]})
        profile.print_profile("kernels", "title", measured, {})
        text = capsys.readouterr().out
        assert ("299 % of their limit: the peaks were disturbed" in text) is is_said
        assert "bf16_dot" not in text and "fma GFLOP/s 100" in text


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (["--context", "100000"], "--context: expected at most the 8192 tokens"),
        (["--prompt-len", "8", "8200"], "--prompt-len: expected at most the 8192 tokens"),
        (["--decode-rows", "1048576"], "1,048,576 rows of 1 token, context 256: needs "),
        (["--isa", "foo"], "--isa: expected an instruction set that this CPU runs"),
    ],
)
def test_kernels_refuse_what_cannot_be_in_one_line(wish, message, capsys):
    assert main(["bench", "kernels", *wish]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


# --- info ----------------------------------------------------------------------------------------


def test_info_counts_a_models_parameters_and_its_memory(checkpoint, capsys):
    with safe_open(checkpoint / "model.safetensors", "numpy") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert main(["info", str(checkpoint), "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {line[:16].strip(): line[17:] for line in lines if line.strip()}
    assert said["parameters"] == f"{count:,}"
    assert said["context"] == "256 tokens"
    num_bytes = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, dim
    assert f"{num_bytes:,} bytes a token" in said["KV cache"]


@pytest.mark.parametrize(
    ("wish", "weights", "kv_bytes"),
    [
        ([], "bfloat16", "256 bytes a token as bfloat16"),
        (["--quantization", "int8"], "int8", "256 bytes a token as bfloat16"),
        # K and V, layers, heads: 16 values and a scale
        (["--kv-cache-dtype", "int8"], "bfloat16", "160 bytes a token as int8"),
        (["--ops", "reference"], "bfloat16", "256 bytes a token as bfloat16"),
    ],
)
def test_info_names_the_formats(checkpoint, capsys, wish, weights, kv_bytes):
    assert main(["info", str(checkpoint), "--program", *wish]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("weights ")]
    assert line.endswith(f" MiB as {weights}")
    assert kv_bytes in text and f"want logits, {weights} weights, " in text
    assert ("\nquantize " in text) == (weights == "int8")  # heads of 16 are shorter than a group


def test_info_says_how_the_kernels_are_tuned(checkpoint, monkeypatch, capsys):
    cpu = load_extension()
    isa, before = cpu.isa(), cpu.tuning()
    monkeypatch.setattr(extension, "_chosen", None)  # as in a new process
    monkeypatch.setattr(extension, "_tuning", None)
    monkeypatch.setenv("STREAMKV_CPU_ISA", isa)
    monkeypatch.setenv("STREAMKV_TUNING", "item_kib=32")
    try:
        assert main(["info", str(checkpoint)]) == 0
    finally:
        cpu.set_tuning(before)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("tuning ")]
    assert line.split(maxsplit=1)[1] == "item 32 KiB (STREAMKV_TUNING)"


def test_info_shows_the_program_of_a_step(checkpoint, capsys):
    assert main(["info", str(checkpoint), "--program", "--context", "40"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name} " in text for name in LLAMA_OPS)


def test_info_profiles_a_checkpoint(checkpoint, quick, capsys):
    steps = ["--decode-rows", "2", "--prompt-len", "20", "--context", "40", "--rounds", "1"]
    assert main(["info", str(checkpoint), "--profile", *steps]) == 0
    got = last_line(capsys)
    assert got["benchmark"] == "profile" and len(got["steps"]) == 2


def test_info_refuses_steps_that_the_cache_cannot_hold(checkpoint, quick, capsys):
    wish = ["--num-gpu-blocks-override", "4", "--decode-rows", "3", "--context", "40"]
    assert main(["info", str(checkpoint), "--profile", *wish]) == 2
    assert "needs 9 KV blocks, the cache has 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (["--profile", "--context", "100000"], "--context: expected at most the 256 tokens"),
        (["--program", "--context", "257"], "--context: expected at most the 256 tokens"),
        (["--program", "--prompt-len", "300"], "--prompt-len: expected at most the 256 tokens"),
        (["--program", "--context", "65", "--max-model-len", "64"], "at most the 64 tokens"),
        (["--profile", "--ops", "reference"], "native program on the CPU; leave --ops reference"),
        (["--profile", "--enforce-eager"], "native program on the CPU; leave --enforce-eager"),
        (["--ops", "reference", "--enforce-eager"], "--enforce-eager is for the native kernels"),
        (["--ops", "native", "--device", "cuda"], "the native kernels run on a CPU"),
        (["--max-model-len", "100000"], "expected at most 256, the positions"),
    ],
)
def test_info_refuses_what_would_not_run(wish, message, checkpoint, capsys):
    assert main(["info", str(checkpoint), *wish]) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert message in line and said.out == ""


def test_steps_that_were_not_asked_for_fit_the_context(checkpoint, capsys):
    assert main(["info", str(checkpoint), "--program", "--max-model-len", "64"]) == 0
    text = capsys.readouterr().out
    assert "64 tokens of the checkpoint's 256" in text
    assert "a step of 1 token in 1 row with 64 tokens of context, 1 wants logits" in text
    assert "a step of 64 tokens in 1 row with 64 tokens" in text


# --- reports -------------------------------------------------------------------------------------


def test_medians_and_percentiles_are_numpys():
    values = np.random.default_rng(0).random(101)
    for share in (0.0, 0.5, 0.9, 0.99):
        expected = np.percentile(values, 100 * share, method="inverted_cdf")
        assert report.percentile(values.tolist(), share) == expected
    rounds = [{"a": float(value), "b": 1.0} for value in values]
    assert report.medians(rounds) == {"a": np.median(values), "b": 1.0}
    assert report.percentile([], 0.5) == 0


def test_a_report_ends_with_one_line_of_json(capsys):
    more = {"more": [1, 123456789, 1.23456789]}
    report.print_report("name", "title", [("x", {"a": 1.0}), ("y", {"b": 1234.5})], more)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["title", "a", "b"], ["x", "1.00"], ["y", "1,234"]]
    assert json.loads(last)["more"] == [1, 123456789, 1.23457]


def test_options_out_of_range_name_their_flag(capsys):
    assert main(["bench", "kernels", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        LoadConfig(input_len=(8,), shared_prefix_len=8)


# --- the books of blocks -------------------------------------------------------------------------


def test_the_books_of_blocks_are_timed_for_each_pool(capsys):
    pools = ["--num-blocks", "200", "1000", "--sequences", "8", "--block-size", "4"]
    assert main(["bench", "blocks", *pools, "--steps", "30", "--rounds", "2"]) == 0
    got = last_line(capsys)
    assert set(got["medians"]) == {"200 blocks", "1,000 blocks"} and got["target_us"] == 100
    for rounds in got["rounds"].values():
        assert len(rounds) == 2
        for one in rounds:
            assert all(one[f"{name} us"] >= 0 for name in blocks.OPERATIONS)
            assert 0 < one["arrive us"] < one["step us"] <= one["99 % us"]


def test_every_column_is_explained_where_help_is(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "blocks", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    for column in blocks.figures([dict.fromkeys(blocks.OPERATIONS, 0.0)]):
        assert column.removesuffix(" us") in words
    assert f"whose step takes {blocks.TARGET_US:.0f} us at most" in words


def test_each_pool_is_said_to_meet_the_target_or_to_miss_it(monkeypatch, capsys):
    steps = {10: 99.0, 2000: 101.0}
    rounds = {pool: [{"step us": step}] for pool, step in steps.items()}
    monkeypatch.setattr(blocks, "measure", lambda options: rounds)
    assert blocks.bench_blocks(BlocksConfig()) == 0
    _, *table, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in table] == [
        ["10", "blocks:", "met"],
        ["2,000", "blocks:", "MISSED"],
    ]
    medians = json.loads(last)["medians"]
    assert set(medians) == {"10 blocks", "2,000 blocks"}


def test_a_step_of_the_books_ends_the_oldest_sequence_and_finds_the_shared_prefix():
    options = BlocksConfig(num_blocks=(400,), sequences=8, block_size=4)
    books = blocks.Books(400, options)
    kv, ends = books._kv, []
    for _ in range(40):
        oldest = books._running[0]
        assert set(books.step()) == set(blocks.OPERATIONS)
        ends.append(len(oldest.token_ids))
        newest = books._running[-1]
        assert len(books._running) == 8 and oldest not in books._running
        shared = books._running[-2].block_table[: blocks.SHARED_BLOCKS]
        assert newest.block_table[: blocks.SHARED_BLOCKS] == shared
        assert len(newest.token_ids) == 4 * blocks.PROMPT_BLOCKS
        for sequence in books._running:
            assert len(sequence.block_table) == kv.num_blocks_for(sequence.num_computed_tokens)
    assert set(ends) == {4 * blocks.PROMPT_BLOCKS + 8}
    books.check()


def test_a_pool_that_running_sequences_do_not_fit_in_is_one_line(capsys):
    assert main(["bench", "blocks", "--num-blocks", "100"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--num-blocks: expected at least 8448, which 256 sequences take, got 100" in line
