"""`streamkv bench offline`: batches of prompts through LLM.generate, and what else does the work.

Owns the rounds and their figures. Prompts are random tokens, new in each round; greedy, without end
tokens, so that all do equal work. Each round gives the same prompts to each, one after the other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..config import EngineConfig
from ..engine.async_engine import AsyncEngine
from ..engine.llm import LLM
from ..errors import ConfigError, StreamkvError
from ..protocol import SamplingParams
from ..weights.hub import checkpoint_of
from .load import Load
from .options import OfflineConfig
from .report import Figures, medians, print_report

Generate = Callable[[Sequence[Sequence[int]], int], int]
"""Answers prompts with so many tokens each; returns how many there are in all."""

NUM_FIRST = 2  # prompts to try each with, before anything is measured
OURS = "LLM.generate"


def bench_offline(engine_config: EngineConfig, options: OfflineConfig) -> int:
    folder = _folder(engine_config) if options.transformers else ""
    with LLM.from_engine(lambda: AsyncEngine(engine_config)) as llm:
        ways: dict[str, Generate] = {OURS: _of_llm(llm)}
        if folder:
            from .one_by_one import OneByOne

            theirs = f"transformers, {options.transformers_dtype}, one by one"
            ways[theirs] = OneByOne(folder, options.transformers_dtype).generate
        rounds = measure(ways, options, llm.info.vocab_size)
        middle = {name: medians(figures) for name, figures in rounds.items()}
        if folder:
            ratio = middle[OURS]["tokens_per_s"] / middle[theirs]["tokens_per_s"]
            middle[OURS]["times_transformers"] = ratio
        details = {
            "model": msgspec.to_builtins(llm.info),
            "config": msgspec.to_builtins(engine_config),
            "options": msgspec.to_builtins(options),
            "medians": middle,
            "rounds": rounds,
        }
        title = f"{engine_config.model_id}, {llm.info.formats}, {options.num_prompts} prompts"
        print_report("offline", title, list(middle.items()), details)
    return 0


def measure(
    ways: Mapping[str, Generate], options: OfflineConfig, vocab_size: int
) -> dict[str, list[Figures]]:
    """Every way in every round, after each was tried once with few prompts."""
    seed = str(options.prompt_seed or random.SystemRandom().getrandbits(48))
    lens = (options.input_len, options.output_len)
    load = Load(options.num_prompts, *lens, shared_len=0, num_requests=options.num_prompts)
    rounds: dict[str, list[Figures]] = {name: [] for name in ways}
    first = load._replace(num_requests=min(NUM_FIRST, options.num_prompts))
    for generate in ways.values():
        generate(first.prompts(vocab_size, f"{seed} first"), 2)
    for number in range(options.rounds):
        prompts = load.prompts(vocab_size, f"{seed} {number}")
        for name, generate in ways.items():
            rounds[name].append(_figures(generate, prompts, options))
    return rounds


def _figures(
    generate: Generate, prompts: Sequence[Sequence[int]], options: OfflineConfig
) -> Figures:
    """One batch. Rates count all of its time."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = generate(prompts, options.output_len)
    elapsed_s = time.perf_counter() - began_s
    if num_tokens != len(prompts) * options.output_len:
        raise StreamkvError(
            f"expected {len(prompts)} x {options.output_len} tokens, got {num_tokens}: prompts and "
            "answers must fit in the model's context"
        )
    return {
        "tokens_per_s": num_tokens / elapsed_s,
        "prompt_tokens_per_s": len(prompts) * options.input_len / elapsed_s,
        "requests_per_s": len(prompts) / elapsed_s,
        "seconds": elapsed_s,
        "cores_busy": (time.process_time() - began_cpu_s) / elapsed_s,
    }


def _of_llm(llm: LLM) -> Generate:
    def generate(prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def _folder(config: EngineConfig) -> str:
    """The checkpoint that transformers can read too. ConfigError."""
    checkpoint = checkpoint_of(config)
    if checkpoint.kind != "huggingface":
        raise ConfigError(
            f"--transformers: expected a folder in Hugging Face format, got {checkpoint.path}; "
            "name one as the model, or leave the flag out"
        )
    return str(checkpoint.path)
