"""The `streamkv` command line: parses it and calls the command.

Owns the parser; the commands stand in command_table.py, what was asked of one in call.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import __version__
from .call import MODEL, Call
from .command_table import BENCHMARKS, COMMANDS, Command
from .commands.process import run_process, say
from .config import DEFAULT_MODEL, EngineConfig, ServerConfig
from .fields import guess
from .flags import add_flags, add_hidden_flags, with_bare_switches, with_dashes
from .variables import unknown_variables
from .vllm_options import OPTIONS as VLLM_OPTIONS
from .vllm_options import SHORT as VLLM_SHORT

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
