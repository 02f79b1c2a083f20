"""The `streamkv` command: parses flags, builds everything, runs it. The one composition root.

Heavy packages (torch, transformers) are imported by what a command builds, never here, so that
`--help` answers at once. Errors meant for people are one line on stderr and exit code 1; wrong
usage is exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import msgspec

from . import __version__
from .bench.options import (
    InfoConfig,
    KernelsConfig,
    LatencyConfig,
    LoadConfig,
    StartupConfig,
)
from .config import DEFAULT_MODEL, EngineConfig, ServerConfig
from .errors import ConfigError, EngineDeadError, StreamkvError
from .eval.options import ENGINE_FLAGS, EvalConfig
from .flags import add_flags, build_config

if TYPE_CHECKING:
    from .engine.async_engine import AsyncEngine
    from .server.serving import Server

# For --ops reference: torch's OpenMP threads spin for milliseconds after a matrix product. Where
# others want the same cores that halves the speed; a few microseconds cost little elsewhere.
OPENMP_SPINS = "4000"
TRAILING_MODEL = "trailing_model"  # MODEL where a flag's list of numbers came before it
LAST_LINE = "its last line is a JSON document"
BENCHMARKS: Mapping[str, tuple[type[msgspec.Struct], str]] = {
    "kernels": (KernelsConfig, "every kernel, beside what the machine can do"),
    "throughput": (LoadConfig, "tokens per second of many streams, in this process"),
    "latency": (LatencyConfig, "time to the first token and between tokens, in this process"),
    "startup": (StartupConfig, "fresh processes: time to the first token, memory"),
}
# Flags of `eval` that are lists, and fields of EngineConfig that aren't.
EVAL_LISTS = ("dtype", "quantization", "kv_cache_dtype")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

logger = logging.getLogger("streamkv")

EXAMPLES = f"""\
examples:
  streamkv serve                        {DEFAULT_MODEL}, chat page at http://127.0.0.1:8000
  streamkv serve ./my-llama --port 9000 a folder in Hugging Face format, or a .gguf file
  streamkv info ./my-llama --program    what it is, and what a step of it costs
  streamkv eval ./my-llama --compare    what fewer bits cost: perplexity, agreement
  streamkv bench throughput ./my-llama  how fast it streams here

A flag that takes several numbers ends at the first word that isn't one: MODEL may come before it or
after it (--concurrency 1 8 32 ./my-llama), and the flag may be repeated.

Every flag of serve can also be set as an environment variable: --max-num-seqs is
STREAMKV_MAX_NUM_SEQS.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = build_parser()
    parsed = vars(parser.parse_args(arguments))
    command = parsed.pop("command", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        return COMMANDS[command](parsed)
    except ConfigError as error:
        return _fail(error, exit_code=2)
    except StreamkvError as error:
        return _fail(error, exit_code=1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; its options come from the config Structs' fields."""
    parser = argparse.ArgumentParser(
        prog="streamkv",
        description="Serve a language model to many clients at once, token by token.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    serve_parser = commands.add_parser(
        "serve",
        help="start the server: OpenAI API, WebSocket, chat page",
        description="Start the server: the OpenAI API, its WebSocket and the chat page.",
        argument_default=argparse.SUPPRESS,
    )
    _add_model(serve_parser)
    add_flags(serve_parser, EngineConfig)
    add_flags(serve_parser, ServerConfig)
    info_parser = commands.add_parser(
        "info",
        help="what a model is, what it takes, what its steps cost",
        description="Say what a model is, what it takes here and what its steps cost. With "
        f"--profile, {LAST_LINE}.",
        argument_default=argparse.SUPPRESS,
    )
    _add_model(info_parser)
    add_flags(info_parser, EngineConfig)
    add_flags(info_parser, InfoConfig, operand=TRAILING_MODEL)
    eval_parser = commands.add_parser(
        "eval",
        help="how near a model's answers stay to float32 in each quantization",
        description="Perplexity of a text, and agreement with the same model in float32, for each "
        "way to run it: quantizations, types of keys and values, other files of the model.",
        argument_default=argparse.SUPPRESS,
    )
    _add_model(eval_parser)
    add_flags(eval_parser, EngineConfig, only=ENGINE_FLAGS)
    add_flags(eval_parser, EvalConfig)
    text = "measure this machine with this engine"
    description = f"Measure this machine with this engine. A table for people; {LAST_LINE}."
    _add_benchmarks(commands.add_parser("bench", help=text, description=description))
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="benchmark", required=True)
    for name, (options_type, text) in BENCHMARKS.items():
        one = benchmarks.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. A table for people; {LAST_LINE}.",
            argument_default=argparse.SUPPRESS,
        )
        has_model = options_type is not KernelsConfig
        if has_model:
            _add_model(one)
            add_flags(one, EngineConfig)
        add_flags(one, options_type, operand=TRAILING_MODEL if has_model else None)


def serve(parsed: dict[str, object]) -> int:
    """Build engine and server from parsed flags and run them until a signal."""
    engine_config = _engine_config(parsed)
    server_config = build_config(ServerConfig, parsed, os.environ)
    _check_key_variable(server_config)
    logging.basicConfig(
        level=server_config.log_level.upper(),
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        handlers=[_log_lines()],
    )
    _warn_if_open(server_config)
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    with _listen(server_config) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(engine_config, server_config, listener))


def _log_lines() -> logging.Handler:
    """On stderr, above a progress bar if there is one."""
    from tqdm import tqdm

    class LogLines(logging.StreamHandler[TextIO]):
        def emit(self, record: logging.LogRecord) -> None:
            with tqdm.external_write_mode(self.stream):
                super().emit(record)

    return LogLines()


def _engine_config(parsed: dict[str, object]) -> EngineConfig:
    positional, trailing = parsed.pop("positional_model", None), parsed.pop(TRAILING_MODEL, None)
    if positional is not None and trailing is not None:
        raise ConfigError(f"expected one model, got {positional!r} and {trailing!r}")
    positional = trailing if positional is None else positional
    if positional is not None and parsed.setdefault("model", positional) != positional:
        raise ConfigError(f"expected one model, got {positional!r} and --model {parsed['model']!r}")
    return build_config(EngineConfig, parsed, os.environ)


def info(parsed: dict[str, object]) -> int:
    """Say what a model is."""
    from .info import print_info

    options = build_config(InfoConfig, parsed, {})
    return print_info(_engine_config(parsed), options, given=frozenset(parsed))


def evaluate(parsed: dict[str, object]) -> int:
    """Score the ways to run a model. What serve shares with it comes as in `serve`."""
    from .eval.run import print_eval

    options = build_config(EvalConfig, parsed, {})
    shared = {name: value for name, value in parsed.items() if name not in EVAL_LISTS}
    return print_eval(_engine_config(shared), options, given=frozenset(parsed))


def bench(parsed: dict[str, object]) -> int:
    """Run one benchmark. Its own options come from flags alone, a model's as in `serve`."""
    benchmark = parsed.pop("benchmark")
    if benchmark == "kernels":
        from .bench.kernels import bench_kernels
        from .bench.tune import bench_tuning

        options = build_config(KernelsConfig, parsed, {})
        return bench_tuning(options) if options.tune else bench_kernels(options)
    engine_config = _engine_config(parsed)
    if benchmark == "throughput":
        from .bench.throughput import bench_throughput

        return bench_throughput(engine_config, build_config(LoadConfig, parsed, {}))
    if benchmark == "latency":
        from .bench.latency import bench_latency

        return bench_latency(engine_config, build_config(LatencyConfig, parsed, {}))
    from .bench.startup import bench_startup

    return bench_startup(engine_config, build_config(StartupConfig, parsed, {}))


COMMANDS: Mapping[str, Callable[[dict[str, object]], int]] = {
    "serve": serve,
    "info": info,
    "eval": evaluate,
    "bench": bench,
}


def _check_key_variable(config: ServerConfig) -> None:
    """Elsewhere an empty variable is an unset one; here that would open the server to all."""
    if not config.api_key and os.environ.get("STREAMKV_API_KEY") == "":
        raise ConfigError("STREAMKV_API_KEY: expected a key, got an empty string; set or unset it")


def _warn_if_open(config: ServerConfig) -> None:
    if config.bind_host not in LOOPBACK_HOSTS and not config.api_key:
        logger.warning(
            "listening on %s without --api-key: anyone who reaches this port can use the model",
            config.bind_host,
        )


def _listen(config: ServerConfig) -> socket.socket:
    """The bound socket; bound before anything loads, so that a taken port fails at once."""
    family = socket.AF_INET6 if ":" in config.bind_host else socket.AF_INET
    try:
        return socket.create_server((config.bind_host, config.port), family=family, backlog=2048)
    except OSError as error:
        # socket.create_server appends the address, which the message has already
        reason = str(error.strerror or error).partition(" (while")[0]
        raise StreamkvError(
            f"can't listen on {config.bind_host}:{config.port}: {reason}; "
            "choose another --port or --host"
        ) from None


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no uvloop on Windows
        return None
    return uvloop.Loop


async def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> int:
    from .engine.async_engine import AsyncEngine
    from .server.serving import Server

    engine = AsyncEngine(engine_config)
    server = Server(engine, server_config)
    logger.info("streamkv %s: %s", __version__, _url(server_config, listener))
    return await run_server(server, engine, listener)


async def run_server(server: Server, engine: AsyncEngine, listener: socket.socket) -> int:
    """Serve until a signal, or raise what kept the model from loading. Returns the exit code."""
    loading = asyncio.create_task(_until_loaded(engine, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        await engine.close()
    if error := await loading:
        raise error
    return 0


async def _until_loaded(engine: AsyncEngine, server: Server) -> StreamkvError | None:
    """Wait for the model; if it can't be loaded, stop the server and return the reason."""
    try:
        await engine.wait_ready()
    except EngineDeadError:  # closed while loading
        return None
    except StreamkvError as error:
        server.should_exit = True
        return error
    # What lives now lives as long as the process: keep the collector from walking it again.
    gc.collect()
    gc.freeze()
    return None


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.bind_host}]" if ":" in config.bind_host else config.bind_host
    return f"http://{host}:{listener.getsockname()[1]}"


def _fail(error: StreamkvError, *, exit_code: int) -> int:
    message = " ".join(str(error).split())
    print(f"streamkv: {message}", file=sys.stderr)
    return exit_code
