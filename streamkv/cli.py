"""The `streamkv` command line: parses it and calls the command.

What a command does stands in its own file and is imported when it is called, so that `--help`
answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec

from . import __version__
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
from .commands.options import PULL_FLAGS, ChatConfig, GenerateConfig
from .commands.process import run_process, say
from .config import DEFAULT_MODEL, EngineConfig, ServerConfig
from .config_file import ConfigFile, read_config_file
from .errors import ConfigError
from .eval.options import ENGINE_FLAGS, EvalConfig
from .fields import guess
from .flags import add_flags, add_hidden_flags, build_config, with_bare_switches, with_dashes
from .variables import check_variables, unknown_variables
from .vllm_options import OPTIONS as VLLM_OPTIONS
from .vllm_options import SHORT as VLLM_SHORT
from .vllm_options import check as check_vllm_options

Options = TypeVar("Options", bound=msgspec.Struct)

MODEL = "trailing_model"  # where the model is stored that stood after a flag's several values
LAST_LINE = "Its last line is a JSON document."
# Flags of `eval` that are lists, and fields of EngineConfig that aren't.
EVAL_LISTS = ("dtype", "quantization", "kv_cache_dtype")

EXAMPLES = f"""\
examples:
  streamkv serve                        {DEFAULT_MODEL}, chat page at http://127.0.0.1:8000
  streamkv serve ./my-llama --port 9000 a folder in Hugging Face format, or a .gguf file
  streamkv chat ./my-llama              talk to it here
  streamkv generate "Once upon" --model ./my-llama
  streamkv info ./my-llama --program    what it is, and what a step of it costs
  streamkv eval ./my-llama --compare    what fewer bits cost: perplexity, agreement
  streamkv bench throughput ./my-llama  how fast it streams here

A flag that takes several numbers ends at the first word that isn't one: MODEL may come before it or
after it (--concurrency 1 8 32 ./my-llama), and the flag may be repeated.

Every flag of serve can also be set as an environment variable, --max-num-seqs as
STREAMKV_MAX_NUM_SEQS, and in a TOML file that --config names, as max-num-seqs = 8. Flags beat
variables, variables beat the file. docs/flags.md lists them all.
"""


class Call(NamedTuple):
    """What was asked of a command, by flags, variables and a file."""

    parsed: dict[str, Any]
    file: ConfigFile | None

    @classmethod
    def of(cls, parsed: dict[str, Any]) -> Call:
        """ConfigError."""
        _settle_model(parsed)
        of_vllm = {name: parsed.pop(name) for name in VLLM_OPTIONS if name in parsed}
        check_vllm_options(of_vllm)
        if "config" not in parsed:  # neither a file nor variables matter to this command
            return cls(parsed, None)
        check_variables(os.environ, given=of_vllm)
        path = parsed.pop("config")
        if path == "":
            raise ConfigError("--config: expected a TOML file, got an empty name; leave it out")
        path = path or os.environ.get("STREAMKV_CONFIG")
        if not path:
            return cls(parsed, None)
        config_types = (EngineConfig, ServerConfig)
        return cls(parsed, read_config_file(path, config_types, VLLM_OPTIONS, check_vllm_options))

    def engine_config(self, *, without: Container[str] = ()) -> EngineConfig:
        given = {name: value for name, value in self.parsed.items() if name not in without}
        return build_config(EngineConfig, given, os.environ, self.file)

    def server_config(self) -> ServerConfig:
        return build_config(ServerConfig, self.parsed, os.environ, self.file)

    def options(self, config_type: type[Options]) -> Options:
        """A command's own, which flags alone set."""
        return build_config(config_type, self.parsed, {})


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_process(lambda: _run(given))


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """What the arguments say, by name. SystemExit for what makes no sense."""
    return vars(build_parser().parse_args(with_dashes(arguments)))


def _run(arguments: Sequence[str]) -> int:
    parsed = parse(arguments)
    run: Callable[[Call], int] | None = parsed.pop("run", None)
    if run is None:
        build_parser().print_help()
        return 2
    reads_variables = "config" in parsed
    call = Call.of(parsed)
    if reads_variables and (unknown := unknown_variables(os.environ)):
        say(f"ignoring variables that nothing here reads: {', '.join(unknown)}")
    return run(call)


def _settle_model(parsed: dict[str, Any]) -> None:
    """Keep the one model that was named, in whatever way. ConfigError."""
    model, trailing = parsed.pop("positional_model", None), parsed.pop(MODEL, None)
    if trailing is not None and trailing.dest and (model is not None or "model" in parsed):
        parsed[trailing.dest].append(trailing.word)  # so it was one of several
        trailing = None
    if trailing is not None:
        if model is not None:
            raise ConfigError(f"expected one model, got {model!r} and {trailing.word!r}")
        model = trailing.word
    if model is not None and parsed.setdefault("model", model) != model:
        raise ConfigError(f"expected one model, got {model!r} and --model {parsed['model']!r}")


# --- the parser ------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """The parser of one command, which gets its flags when it is the one that was called."""

    def __init__(self, *, command: Command | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._command = command

    def parse_known_args(self, arguments: Any, *args: Any) -> Any:  # type: ignore[override]
        if self._command is not None:
            _fill(self, self._command)
            takes_model = self._command.operand == "model"  # and no text that may be "yes"
            self._command = None
            arguments = with_bare_switches(arguments, self._actions, alone_too=takes_model)
        parsed, unknown = super().parse_known_args(arguments, *args)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            hint = guess(unknown[0].partition("=")[0], flags)
            self.error(f"unexpected: {' '.join(unknown)}" + (f"; {hint}" if hint else ""))
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; its options come from the config Structs' fields."""
    parser = CommandParser(
        prog="streamkv",
        description="Serve a language model to many clients at once, token by token.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamkv {__version__}")
    commands = parser.add_subparsers(metavar="command", parser_class=CommandParser)
    for name, command in COMMANDS.items():
        _add_command(commands, name, command)
    text = "measure this machine with this engine"
    bench = commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}.")
    benchmarks = bench.add_subparsers(
        metavar="benchmark", required=True, parser_class=CommandParser
    )
    for name, benchmark in BENCHMARKS.items():
        _add_command(benchmarks, name, benchmark)
    return parser


def _add_command(commands: Any, name: str, command: Command) -> None:
    commands.add_parser(
        name,
        help=command.summary,
        description=command.description,
        argument_default=argparse.SUPPRESS,
        command=command,
    ).set_defaults(run=command.run)


def _fill(parser: argparse.ArgumentParser, command: Command) -> None:
    if command.operand == "model":
        parser.add_argument(
            "positional_model", nargs="?", metavar="MODEL", help="the same as --model"
        )
    elif command.operand:
        parser.add_argument(command.operand, nargs="*", metavar=command.operand.upper())
    operand = MODEL if command.operand == "model" else None
    if command.engine_fields != ():
        text = "TOML file with options of serve"
        parser.add_argument("--config", metavar="FILE", default=None, help=text)
        add_flags(parser, EngineConfig, operand=operand, only=command.engine_fields)
    if command.options is not None:
        add_flags(parser, command.options, operand=operand)
    if command.options is ServerConfig:
        kinds = {name: option.kind for name, option in VLLM_OPTIONS.items()}
        add_hidden_flags(parser, kinds, VLLM_SHORT, MODEL)


# --- the commands ----------------------------------------------------------------------------


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
