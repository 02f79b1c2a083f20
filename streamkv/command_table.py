"""Every command of `streamkv`: its row in the help, its options, and the function that runs it.

What a command does stands in its own file and is imported when it is called, so that `--help`
answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import msgspec

from .bench.options import (
    BLOCKS_COLUMNS,
    BlocksConfig,
    FaceConfig,
    InfoConfig,
    KernelsConfig,
    LatencyConfig,
    LoadConfig,
    OfflineConfig,
    StartupConfig,
)
from .call import Call
from .commands.options import PULL_FLAGS, ChatConfig, GenerateConfig
from .config import ServerConfig
from .eval.options import ENGINE_FLAGS, EvalConfig

LAST_LINE = "Its last line is a JSON document."
# Flags of `eval` that are lists, and fields of EngineConfig that aren't.
EVAL_LISTS = ("dtype", "quantization", "kv_cache_dtype")


class Command(NamedTuple):
    """A row of the help, and what can be asked of the command."""

    run: Callable[[Call], int]
    options: type[msgspec.Struct] | None  # its own
    summary: str
    notes: str = ""
    engine_fields: Container[str] | None = None  # those of EngineConfig it takes; None: all
    operand: str = "model"

    @property
    def description(self) -> str:
        return f"{self.summary[0].upper()}{self.summary[1:]}. {self.notes}".strip()


def _serve(call: Call) -> int:
    from .commands.serve import serve

    return serve(call.engine_config(), call.server_config())


def _chat(call: Call) -> int:
    from .commands.chat import chat

    return chat(call.engine_config(), call.options(ChatConfig))


def _generate(call: Call) -> int:
    from .commands.generate import generate

    prompts = tuple(call.parsed.get("prompt", ()))
    return generate(call.engine_config(), call.options(GenerateConfig), prompts)


def _pull(call: Call) -> int:
    from .commands.pull import pull

    return pull(call.engine_config())


def _info(call: Call) -> int:
    from .info import print_info

    options = call.options(InfoConfig)
    return print_info(call.engine_config(), options, given=frozenset(call.parsed))


def _eval(call: Call) -> int:
    from .eval.run import print_eval

    options = call.options(EvalConfig)
    engine_config = call.engine_config(without=EVAL_LISTS)
    return print_eval(engine_config, options, given=frozenset(call.parsed))


def _bench_kernels(call: Call) -> int:
    from .bench.kernels import bench_kernels
    from .bench.tune import bench_tuning

    options = call.options(KernelsConfig)
    return bench_tuning(options) if options.tune else bench_kernels(options)


def _bench_blocks(call: Call) -> int:
    from .bench.blocks import bench_blocks

    return bench_blocks(call.options(BlocksConfig))


def _bench_face(call: Call) -> int:
    from .bench.face import bench_face

    return bench_face(call.engine_config(), call.options(FaceConfig))


def _bench_throughput(call: Call) -> int:
    from .bench.throughput import bench_throughput

    return bench_throughput(call.engine_config(), call.options(LoadConfig))


def _bench_latency(call: Call) -> int:
    from .bench.latency import bench_latency

    return bench_latency(call.engine_config(), call.options(LatencyConfig))


def _bench_offline(call: Call) -> int:
    from .bench.offline import bench_offline

    return bench_offline(call.engine_config(), call.options(OfflineConfig))


def _bench_startup(call: Call) -> int:
    from .bench.startup import bench_startup

    return bench_startup(call.engine_config(), call.options(StartupConfig))


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        _serve,
        ServerConfig,
        "start the server: OpenAI API, WebSocket, chat page",
        "Options of vLLM that aren't listed are known too: docs/flags.md has what becomes of them.",
    ),
    "chat": Command(_chat, ChatConfig, "talk to a model in this terminal"),
    "generate": Command(
        _generate,
        GenerateConfig,
        "continue or answer prompts, to stdout",
        "PROMPT - is read from stdin.",
        operand="prompt",
    ),
    "pull": Command(
        _pull,
        None,
        "fetch a model, and say where it is",
        engine_fields=PULL_FLAGS,
    ),
    "info": Command(
        _info,
        InfoConfig,
        "what a model is, what it takes, what its steps cost",
        f"With --profile: {LAST_LINE}",
    ),
    "eval": Command(
        _eval,
        EvalConfig,
        "how near a model's answers stay to float32 in each quantization",
        "Perplexity of a text, and agreement with the same model in float32, for each way to run "
        "it: quantizations, types of keys and values, other files of the model.",
        engine_fields=ENGINE_FLAGS,
    ),
}
TABLE = f"A table for people. {LAST_LINE}"
BENCHMARKS: Mapping[str, Command] = {
    "kernels": Command(
        _bench_kernels,
        KernelsConfig,
        "every kernel, beside what the machine can do",
        TABLE,
        engine_fields=(),
        operand="",
    ),
    "blocks": Command(
        _bench_blocks,
        BlocksConfig,
        "the books of KV blocks: what they cost a step",
        f"{BLOCKS_COLUMNS} {TABLE}",
        engine_fields=(),
        operand="",
    ),
    "face": Command(
        _bench_face,
        FaceConfig,
        "CPU of the server for each token it streams, without a model",
        f"bare: of a program that only writes the same frames to the sockets. {TABLE}",
        engine_fields=("model",),
    ),
    "throughput": Command(
        _bench_throughput,
        LoadConfig,
        "tokens per second of many streams, in this process",
        TABLE,
    ),
    "latency": Command(
        _bench_latency,
        LatencyConfig,
        "time to the first token and between tokens, in this process",
        TABLE,
    ),
    "offline": Command(
        _bench_offline,
        OfflineConfig,
        "batches of prompts through LLM.generate, in this process",
        TABLE,
    ),
    "startup": Command(
        _bench_startup,
        StartupConfig,
        "fresh processes: time to the first token, memory",
        TABLE,
    ),
}
