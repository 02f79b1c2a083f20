"""What is the native runners' alone: no torch, little memory, each ISA, native serving."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from drive import load_runner, run_requests
from runner.support import (
    NUM_TOKENS,
    greedy,
    greedy_requests,
    prompts,
    step,
    tokens_of,
)
from tiny import save_tiny_checkpoint

from streamkv import _cpu
from streamkv.errors import ConfigError, ModelLoadError
from streamkv.ops.extension import load_extension
from streamkv.protocol import Ask, unpack_ints
from streamkv.runner.cpu_runner import EagerCpuRunner
from streamkv.step_bytes import decode_output, encode_step

ENGINE = """
import asyncio, sys
from streamkv import AsyncEngine, SamplingParams

async def main():
    options = {"num_gpu_blocks_override": 64, "packed_cache_gib": 0.0}
    async with AsyncEngine(sys.argv[1], device="cpu", **options) as engine:
        params = SamplingParams(temperature=0.5, seed=1, max_tokens=6, ignore_eos=True)
        (completion,) = await engine.generate("the quick brown fox", params).collect()
        assert len(completion.token_ids) == 6
        print(engine.info.ops)

asyncio.run(main())
heavy = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_an_engine_loads_and_answers_without_torch_and_transformers(
    folder, default_checkpoint, kind
):
    path = folder if kind == "huggingface" else default_checkpoint.path
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ENGINE, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("native (")


MEMORY = """
import sys
from pathlib import Path
from streamkv.config import EngineConfig
from streamkv.runner.cpu_runner import CpuRunner
from streamkv.weights.hub import Checkpoint

def status(name):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) * 1024

before = status("VmRSS")
path, dtype, quantization = sys.argv[1:]
config = EngineConfig(dtype=dtype, quantization=quantization, packed_cache_gib=0.0)
runner = CpuRunner(config, Checkpoint(Path(path), "gguf"))
info = runner.load(lambda stage, fraction: None)
print(before, status("VmRSS"), status("VmHWM"), info.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "quantization", "bytes_per_weight"),
    [("bfloat16", "none", 2), ("float32", "auto", 4), ("bfloat16", "auto", 0.7)],
)
def test_loading_takes_the_weights_memory_and_a_little_more(
    default_checkpoint, dtype, quantization, bytes_per_weight
):
    """Neither the file nor a whole tensor as float32 is held besides what is packed."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(default_checkpoint.path), dtype, quantization],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    before, loaded, peak, weight_bytes = map(int, done.stdout.split())
    assert weight_bytes == pytest.approx(bytes_per_weight * 134_500_000, rel=0.1)
    assert weight_bytes < loaded - before + (8 << 20), "the weights are in memory"
    assert peak - before - weight_bytes < 64 << 20  # the file is 94 MiB, the embedding 108


@pytest.fixture
def instruction_set():
    """Sets it for what is loaded from now on."""
    before = load_extension().isa()
    yield _cpu.set_isa
    _cpu.set_isa(before)


@pytest.mark.parametrize("isa", _cpu.available_isas())
def test_every_instruction_set_gives_transformers_tokens(folder, oracle, instruction_set, isa):
    instruction_set(isa)
    expected = [greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts()]
    for config in ({}, {"enforce_eager": True}):
        runner, info = load_runner(folder, ops="native", threads=2, **config)
        assert info.ops.endswith(f"({isa}, 2 threads)")
        assert tokens_of(run_requests(runner, info, greedy_requests())) == expected


@pytest.mark.parametrize("config", [{}, {"enforce_eager": True}])
def test_kernels_that_cannot_serve_the_model_say_so_at_load(tmp_path, config):
    narrow = save_tiny_checkpoint(tmp_path, head_dim=6)
    with pytest.raises(ModelLoadError, match="up to 256, got 6; use --ops reference"):
        load_runner(narrow, ops="native", **config)


def no_more(error):
    def fail(*args, **kwargs):
        raise error

    return fail


THREADS = RuntimeError("Team: can't start new thread, 7 of 8: Resource temporarily unavailable")


@pytest.mark.parametrize(
    "error", [THREADS, MemoryError("std::bad_alloc")], ids=["threads", "memory"]
)
@pytest.mark.parametrize("config", [{}, {"enforce_eager": True}])
def test_no_room_for_the_threads_names_their_flag(folder, monkeypatch, config, error):
    monkeypatch.setattr(_cpu, "Team", no_more(error))
    with pytest.raises(ConfigError, match=r"8 threads can't be started .*--threads \(8\)"):
        load_runner(folder, ops="native", threads=8, **config)


def test_no_room_for_the_threads_that_load_names_their_flag(folder, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_more(RuntimeError("can't start new thread")))
    with pytest.raises(ConfigError, match=r"8 threads can't be started .*--threads \(8\)"):
        load_runner(folder, ops="native", threads=8)


@pytest.mark.parametrize("config", [{}, {"enforce_eager": True}])
def test_no_room_for_the_largest_step_names_its_flags(folder, monkeypatch, config):
    monkeypatch.setattr(_cpu, "Runner", no_more(MemoryError("std::bad_alloc")))
    expected = r"largest step \(up to .*iB\).*--max-num-batched-tokens \(700\), .*seqs \(16\)"
    with pytest.raises(ConfigError, match=expected):
        load_runner(folder, ops="native", max_num_batched_tokens=700, max_num_seqs=16, **config)


def test_a_second_engine_can_not_change_the_instruction_set(folder, monkeypatch):
    first, info = load_runner(folder, ops="native", enforce_eager=True)
    tokens = tokens_of(run_requests(first, info, greedy_requests()))
    chosen, *others = sorted(_cpu.available_isas(), key=lambda isa: isa != _cpu.isa())
    if not others:
        pytest.skip("there is but one")
    monkeypatch.setenv("STREAMKV_CPU_ISA", others[0])
    with pytest.raises(ConfigError, match=f"expected '{chosen}', .* got '{others[0]}'"):
        load_runner(folder, ops="native")
    assert tokens_of(run_requests(first, info, greedy_requests())) == tokens


def test_a_step_larger_than_any_that_was_planned_is_an_error_and_the_next_one_works(folder, oracle):
    runner, _ = load_runner(folder, ops="native", max_num_batched_tokens=16)
    prompt = prompts()[8]  # 31 tokens
    output = runner.step(step(0, [(0, 0, 31, Ask.SAMPLE)], added=[(0, prompt, [0, 1])]))
    assert "16" in output.error and output.sampled == b""
    assert runner.step(step(1, [(0, 0, 16, Ask.NONE)])).error == ""
    output = runner.step(step(2, [(0, 16, 15, Ask.SAMPLE)]))
    assert [*unpack_ints(output.sampled)] == greedy(oracle, prompt, 1)


def test_an_error_between_the_halves_leaves_the_step_sent_ahead_and_other_rows_alone(
    folder, oracle, monkeypatch
):
    runner, _ = load_runner(folder, ops="native", enforce_eager=True)
    failures = [RuntimeError("out of memory:\ntried to\nallocate")]
    logits = EagerCpuRunner._logits

    def fail_once(self, parts, batch):
        if failures and batch.num_tokens == 13:
            raise failures.pop()
        return logits(self, parts, batch)

    monkeypatch.setattr(EagerCpuRunner, "_logits", fail_once)
    healthy, prompt = prompts()[4], prompts()[5]
    runner.step(step(0, [(0, 0, len(healthy), Ask.SAMPLE)], added=[(0, healthy, [0, 1])]))
    failed = runner.step(step(1, [(1, 0, 13, Ask.SAMPLE)], added=[(1, prompt, [2])]))
    assert failed.error == "RuntimeError: out of memory: tried to allocate"
    assert failed.sampled == b"" and failed.step_id == 1
    ahead = runner.step(step(2, [(0, 8, 1, Ask.SAMPLE), (1, 13, 1, Ask.SAMPLE)]))
    assert ahead.error == "" and unpack_ints(ahead.sampled)[0] == greedy(oracle, healthy, 2)[1]
    again = runner.step(step(3, [(1, 0, 13, Ask.SAMPLE)], removed=[1], added=[(1, prompt, [2])]))
    assert [*unpack_ints(again.sampled)] == greedy(oracle, prompt, 1)


def test_steps_served_from_a_channel_are_answered_in_order(folder, oracle):
    runner, _ = load_runner(folder, ops="native")
    channel = _cpu.Channel()
    assert runner.serve(channel, 0.0) is False, "nothing to do"
    prompt = prompts()[4]
    channel.submit(encode_step(step(0, [(0, 0, 8, Ask.SAMPLE)], added=[(0, prompt, [0, 1])])))
    channel.submit(encode_step(step(1, [(0, 8, 1, Ask.SAMPLE)])))
    assert runner.serve(channel, 0.0) is False
    outputs = [decode_output(data) for data in channel.take()]
    assert [output.step_id for output in outputs] == [0, 1]
    tokens = [token for output in outputs for token in unpack_ints(output.sampled)]
    assert tokens == greedy(oracle, prompt, 2)
    served: list[bool] = []
    thread = threading.Thread(target=lambda: served.append(runner.serve(channel, 60.0)))
    thread.start()
    channel.close()
    thread.join(timeout=30)
    assert served == [True]
    runner.close()
    with pytest.raises(ModelLoadError, match="no model is loaded"):
        runner.serve(channel, 0.0)
