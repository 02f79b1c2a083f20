"""What a folder in Hugging Face format says of its tokenizer.

Owns which files that is: tokenizer.json, or an older format that converts to it, and the special
tokens, end tokens and chat template that other files add. Knows nothing about what a Tokenizer
makes of them. Invariant: each broken file is a ModelLoadError that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ..errors import ModelLoadError, one_line
from ..files import is_file, read_object_if_any, read_text, unreadable, what_it_is
from .chat_templates import DEFAULT
from .gguf_metadata import MAX_TOKEN_ID
from .tokenizer_files import TOKENIZER_FILES

PANIC = "PanicException"  # what a bug in a library of Rust raises; it can't be imported
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MORE_SPECIAL_NAMES = ("sep_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_MORE_TEMPLATES = "additional_chat_templates"  # a folder; the files are named as the templates
_OLDER_FILES = TOKENIZER_FILES[1:]  # of formats before tokenizer.json


class TokenizerFolder(NamedTuple):
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]  # "bos_token", … → its text
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]  # by name; most have one, DEFAULT


def read_tokenizer_folder(path: Path, chat_template: str | None = None) -> TokenizerFolder:
    """Everything at once; a `chat_template` that is given stands for the folder's.
    ModelLoadError."""
    backend = _read_backend(path)
    config = read_object_if_any(path / "tokenizer_config.json")
    declared = read_object_if_any(path / "special_tokens_map.json") | config
    specials = _special_tokens(declared)
    _declare_added(backend, declared)
    eos_ids = declared_eos_ids(path)
    eos_id = backend.token_to_id(specials.get("eos_token", ""))
    return TokenizerFolder(
        backend=backend,
        special_tokens=specials,
        eos_token_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        chat_templates=(
            _templates(path, config) if chat_template is None else {DEFAULT: chat_template}
        ),
    )


def declared_eos_ids(path: Path) -> frozenset[int]:
    """The union of what the model's two configs declare, each an int, a list or absent.

    A negative id is refused: a model without an end token leaves the key out, or writes null.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = read_object_if_any(file).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:  # bool is no id
                raise ModelLoadError(
                    f"{file}: expected eos_token_id to be whole numbers from 0 to {MAX_TOKEN_ID}, "
                    f"got {token_id!r:.100}; mend the file"
                )
            ids.add(token_id)
    return frozenset(ids)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    is_there = is_file(file)
    older = next((path / name for name in _OLDER_FILES if (path / name).is_file()), None)
    if not is_there and older is None:
        raise ModelLoadError(
            f"{path}: expected a tokenizer, got no tokenizer.json and none of "
            f"{', '.join(_OLDER_FILES)}; get the whole checkpoint, or name another with --tokenizer"
        )
    try:
        if is_there:
            return tokenizers.Tokenizer.from_file(str(file))
        return _converted(path)
    except OSError as error:
        raise unreadable(file if is_there else older or path, error) from error
    # `tokenizers` raises bare Exception, `transformers` anything.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        found = file if is_there else older or path
        kind = what_it_is(found)
        reason = one_line(error) if kind in ("", "JSON") else f"it is {kind}"
        raise ModelLoadError(
            f"{found}: the tokenizer can't be read: {reason or type(error).__name__}; get the file "
            "again, or name another tokenizer with --tokenizer"
        ) from error


def _converted(path: Path) -> tokenizers.Tokenizer:
    """Only tokenizers of the formats before tokenizer.json need the conversion, and its import."""
    from transformers import AutoTokenizer

    # False: left out, it asks on the terminal.
    converted = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"expected one that converts to tokenizer.json, got {type(converted).__name__}"
        )
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name → text of the special tokens; each is written as a string or as {"content": …}."""
    texts = {name: _text_of(config.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _declare_added(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Make tokens what the configs say they are, as transformers does: matched whole, and special
    ones left out of answers. Those that the tokenizer lacks aren't made: the model has no row for
    them."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    as_they_were = {repr(token) for token in known.values()}
    decoder = config.get("added_tokens_decoder")
    described = map(_added_token, decoder.values() if isinstance(decoder, dict) else ())
    wanted = {token.content: token for token in described if token is not None}
    for value in _special_values(config):
        token = _added_token(value)
        if token is not None:
            token = wanted.get(token.content) or known.get(token.content) or token
            token.special = True
            wanted[token.content] = token
    for text, token in wanted.items():
        if backend.token_to_id(text) is None:
            continue
        token.special = token.special or (text in known and known[text].special)
        if repr(token) not in as_they_were:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _special_values(config: Mapping[str, Any]) -> Iterator[Any]:
    """What is called a special token, by name or in a list."""
    for name in (*_SPECIAL_NAMES, *_MORE_SPECIAL_NAMES):
        yield config.get(name)
    for name in _SPECIAL_LISTS:
        value = config.get(name)
        if isinstance(value, (list, dict)):
            yield from value.values() if isinstance(value, dict) else value


def _added_token(value: Any) -> tokenizers.AddedToken | None:
    """From a string, or {"content": …} with or without flags; None for anything else."""
    text = _text_of(value)
    if text is None:
        return None
    if isinstance(value, str):
        return tokenizers.AddedToken(text, normalized=False)
    flags = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
    return tokenizers.AddedToken(text, **flags)


def _text_of(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: chat_template.jinja and the folder beside it,
    chat_template.json, or tokenizer_config.json."""
    file = path / "chat_template.jinja"
    if is_file(file):
        others = sorted((path / _MORE_TEMPLATES).glob("*.jinja"))
        return {other.stem: read_text(other) for other in others} | {DEFAULT: read_text(file)}
    source = read_object_if_any(path / "chat_template.json").get("chat_template")
    source = config.get("chat_template") if source is None else source
    if source is None:
        return {}
    if isinstance(source, str):
        return {DEFAULT: source}
    by_name: dict[str, str] = {}
    for entry in source if isinstance(source, list) else [source]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                by_name[name] = template
            case _:
                raise ModelLoadError(
                    f"{path}: expected the chat template to be a string or a list of templates "
                    f"with names, got {source!r:.100}; mend the checkpoint's chat template, or "
                    "name a file with --chat-template"
                )
    return by_name
