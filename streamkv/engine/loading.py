"""From a configuration to a runner and a tokenizer: the one place where the engine builds them.

Owns the order of loading and the check of the configuration. It must not know requests or the
event loop; building happens on the device thread. Invariant: importing this module imports nothing
heavy, and building from a given runner and tokenizer imports nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocol import Runner
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..weights.hub import Checkpoint

Progress = Callable[[str, float], None]


def resolve_config(config: EngineConfig | str | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """The configuration with the overrides applied and every range checked. ConfigError."""
    if isinstance(config, str):
        config = EngineConfig(model=config)
    fields = msgspec.to_builtins(config or EngineConfig())
    for name in overrides:
        if name not in fields:
            raise ConfigError(f"expected a field of EngineConfig ({', '.join(fields)}), got {name}")
    try:
        return msgspec.convert(fields | dict(overrides), EngineConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"EngineConfig: {exc}") from None


class Model(NamedTuple):
    """The two halves of a model: the device's and the text's."""

    runner: Runner
    tokenizer: Tokenizer


def build_model(
    config: EngineConfig,
    runner: Runner | None,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Model:
    """Build what is not given. The runner has still to `load`. ModelLoadError, ConfigError."""
    if runner is not None and tokenizer is not None:
        return Model(runner, tokenizer)
    from ..weights.hub import resolve_checkpoint

    progress("finding the checkpoint", 0.0)
    checkpoint = resolve_checkpoint(config.model, progress)
    if tokenizer is None:
        progress("reading the tokenizer", 0.0)
        tokenizer = read_tokenizer(checkpoint)
    if runner is None:
        progress("importing the runner", 0.0)
        from ..runner.select import build_runner

        runner = build_runner(config, checkpoint)
    return Model(runner, tokenizer)


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint brings. ModelLoadError."""
    if checkpoint.kind == "huggingface":
        return Tokenizer.from_folder(checkpoint.path)
    from ..weights.gguf import GGUFFile

    file = GGUFFile(checkpoint.path)
    try:
        return Tokenizer.from_gguf(file.metadata)
    finally:
        file.close()
