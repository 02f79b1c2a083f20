"""From a configuration to a runner, a tokenizer and a loop: the one place where the engine builds
them.

Owns the order of loading, the check of the configuration, and which tokenizer, chat template and
sampling defaults the model gets. It must not know requests; runner and tokenizer are built on the
device thread. Invariant: importing this module imports nothing heavy, and building from a given
runner and tokenizer imports nothing at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..config import EngineConfig
from ..core.scheduler import Scheduler
from ..errors import ConfigError, EngineDeadError, ModelLoadError
from ..files import about, is_file, read_object_if_any, read_text
from ..progress import Watch, unwatched
from ..protocol import BlockStore, MaskBoard, Runner, RunnerInfo, StepInput
from ..text.chat_template import ChatTemplate
from ..text.gguf_metadata import gguf_eos_ids
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_folder import declared_eos_ids
from .engine_loop import EngineLoop

if TYPE_CHECKING:
    from ..weights.hub import Checkpoint

logger = logging.getLogger(__name__)

COPY_BYTES_PER_STEP = 32 << 20  # to host memory and back: some milliseconds, which decodes wait for


def resolve_config(config: EngineConfig | str | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """The configuration with the overrides applied and every range checked. ConfigError."""
    if isinstance(config, str):
        config = EngineConfig(model=config)
    fields = EngineConfig.__struct_fields__
    for name in overrides:
        if name not in fields:
            raise ConfigError(f"expected a field of EngineConfig ({', '.join(fields)}), got {name}")
    return msgspec.structs.replace(config or EngineConfig(), **overrides)


class TextSide(NamedTuple):
    """What a checkpoint has besides weights."""

    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, Any]  # fields of SamplingParams


class Model(NamedTuple):
    """The two halves of a model, the device's and the text's."""

    runner: Runner
    text: TextSide


def build_model(
    config: EngineConfig,
    runner: Runner | None,
    tokenizer: Tokenizer | None,
    progress: Watch,
) -> Model:
    """Build what is not given. The runner has still to `load`. ModelLoadError, ConfigError."""
    if runner is not None and tokenizer is not None:
        return Model(runner, TextSide(tokenizer, {}))
    from ..weights.hub import checkpoint_of

    read_chat_template(config)  # before a download: what is wrong with it is quickly said
    progress("finding the checkpoint", 0.0)
    checkpoint = checkpoint_of(config, progress)
    if tokenizer is None:
        progress("reading the tokenizer", 0.0)
        text = read_text_side(config, checkpoint, progress)
    else:
        text = TextSide(tokenizer, {})
    if runner is None:
        progress("importing the runner", 0.0)
        from ..runner.select import build_runner

        runner = build_runner(config, checkpoint)
    return Model(runner, text)


def build_loop(
    config: EngineConfig,
    info: RunnerInfo,
    eos_token_ids: frozenset[int],
    store: BlockStore | None,
    masks: MaskBoard | None,
    submit: Callable[[StepInput], None],
    on_dead: Callable[[EngineDeadError], None],
) -> EngineLoop:
    """With its scheduler, for a runner that has loaded. See EngineLoop."""
    scheduler = Scheduler(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        eos_token_ids=eos_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_slots=info.num_host_slots,
        has_store=store is not None,
        max_copies=max(1, COPY_BYTES_PER_STEP // max(info.block_bytes, 1)),
        max_session_blocks=int(config.session_memory * info.num_blocks),
        preemption_mode=config.preemption_mode,
        copy_block_s=info.copy_block_s,
        token_s=info.token_s,
    )
    return EngineLoop(
        scheduler,
        submit,
        on_dead,
        depth=1 if config.async_scheduling else 0,
        num_host_slots=info.num_host_slots,
        store=store,
        masks=masks,
    )


def read_text_side(
    config: EngineConfig, checkpoint: Checkpoint, progress: Watch = unwatched
) -> TextSide:
    """The tokenizer that the configuration asks for, and the checkpoint's sampling defaults.
    ModelLoadError, ConfigError."""
    from ..weights.hub import resolve_tokenizer
    from ..weights.sampling_defaults import folder_sampling_defaults, gguf_sampling_defaults

    path, metadata = checkpoint.path, _metadata(checkpoint)
    defaults: Mapping[str, Any] = {}
    if config.generation_config == "auto":
        defaults = (
            folder_sampling_defaults(path)
            if metadata is None
            else gguf_sampling_defaults(metadata, path)
        )
    template = read_chat_template(config)
    if config.tokenizer:
        eos_ids = declared_eos_ids(path) if metadata is None else gguf_eos_ids(metadata)
        other = resolve_tokenizer(
            config.tokenizer,
            progress,
            model=config.model,
            revision=config.revision,
            download_dir=config.download_dir,
        )
        tokenizer = read_tokenizer(other, chat_template=template, more_eos_ids=eos_ids)
    else:
        tokenizer = _build_tokenizer(path, metadata, template)
    _check_vocabulary(config, path, metadata, tokenizer)
    if config.tool_call_parser != "auto":
        tokenizer = tokenizer.with_tool_format(config.tool_call_parser)
    return TextSide(tokenizer, defaults)


def _check_vocabulary(
    config: EngineConfig, path: Path, metadata: Mapping[str, Any] | None, tokenizer: Tokenizer
) -> None:
    """ConfigError for another model's tokenizer, which has tokens that this one lacks. (A model's
    own may have some, which its training added and never used.)"""
    if metadata is None:
        known = read_object_if_any(path / "config.json").get("vocab_size")
    else:
        tokens = metadata.get("tokenizer.ggml.tokens")
        known = len(tokens) if isinstance(tokens, list) else None
    if not isinstance(known, int) or tokenizer.vocab_size <= known:
        return
    if config.tokenizer:
        raise ConfigError(
            f"--tokenizer {config.tokenizer}: expected a tokenizer of the {known:,} tokens that "
            f"{path} has, got one of {tokenizer.vocab_size:,}; name the model's own"
        )
    logger.warning(
        "%s: the tokenizer has %d tokens, the model %d: texts with one of the others are refused",
        path,
        tokenizer.vocab_size,
        known,
    )


def read_tokenizer(
    checkpoint: Checkpoint,
    *,
    chat_template: str | None = None,
    more_eos_ids: Collection[int] = (),
) -> Tokenizer:
    """The tokenizer that a checkpoint brings, with another chat template and end tokens besides its
    own if they are given. ModelLoadError."""
    return _build_tokenizer(checkpoint.path, _metadata(checkpoint), chat_template, more_eos_ids)


def read_chat_template(config: EngineConfig) -> str | None:
    """The template of --chat-template, which compiles; None without one. ConfigError."""
    if not config.chat_template:
        return None
    file = Path(config.chat_template).expanduser()
    try:
        if not is_file(file):
            raise ModelLoadError(f"{file}: expected a file with a Jinja template, got no such file")
        source = read_text(file)
        ChatTemplate(source)
    except ModelLoadError as error:
        reason = error.message.partition("; ")[0]
        raise ConfigError(
            f"--chat-template {config.chat_template}: {reason}; mend the file, or leave the flag "
            "out to use the checkpoint's"
        ) from None
    return source


def _metadata(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Of a GGUF file. ModelLoadError."""
    if checkpoint.kind == "huggingface":
        return None
    from ..weights.gguf import GGUFFile

    file = GGUFFile(checkpoint.path)
    file.close()
    return file.metadata


def _build_tokenizer(
    path: Path,
    metadata: Mapping[str, Any] | None,
    chat_template: str | None,
    more_eos_ids: Collection[int] = (),
) -> Tokenizer:
    """From a GGUF file's metadata, or from a folder. What is wrong names it."""
    with about(path):
        if metadata is None:
            return Tokenizer.from_folder(
                path, chat_template=chat_template, more_eos_ids=more_eos_ids
            )
        return Tokenizer.from_gguf(metadata, chat_template=chat_template, more_eos_ids=more_eos_ids)
