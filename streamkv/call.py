"""What was asked of a command: by flags, by variables and by a file.

Knows no command. Invariant: what nobody knows, or what contradicts itself, is a ConfigError.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any, NamedTuple, TypeVar

import msgspec

from .config import EngineConfig, ServerConfig
from .config_file import ConfigFile, read_config_file
from .errors import ConfigError
from .flags import build_config
from .variables import check_variables
from .vllm_options import OPTIONS as VLLM_OPTIONS
from .vllm_options import check as check_vllm_options

Options = TypeVar("Options", bound=msgspec.Struct)

MODEL = "trailing_model"  # where the model is stored that stood after a flag's several values


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
