"""What a GGUF file's metadata says of its tokenizer, read with types.

Owns the meaning of the `tokenizer.*` keys: tokens, their types, special ids, the chat template.
Knows nothing about the file format or about tokenization. Invariant: what it gives back is of the
type that it says; anything else in the file is a ModelLoadError that names the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from .chat_templates import DEFAULT

MAX_TOKEN_ID = 2**31 - 1
_TEMPLATE = "tokenizer.chat_template"
OTHER_TOKENIZER = "name the folder of the model's own tokenizer with --tokenizer"
# Control tokens that end a turn or a text. A file names one of them, two or three at most, where
# the models' own generation_config.json has them all.
END_TOKENS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "</s>")
    + ("<end_of_turn>", "<｜end▁of▁sentence｜>")
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(NamedTuple):
    """Texts and types of the tokens, by id."""

    tokens: list[str]
    types: list[int]

    def entries(self) -> Iterator[tuple[str, int]]:
        """Text and type of each."""
        return zip(self.tokens, self.types, strict=True)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokens. ModelLoadError."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelLoadError(
            "GGUF: expected tokenizer.ggml.tokens, got a file without; it holds no tokenizer: "
            "convert the model again, or name a tokenizer with --tokenizer"
        )
    tokens = list_of(str, "tokens", tokens)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    types = list_of(int, "token_type", types)
    if len(types) != len(tokens):
        raise ModelLoadError(f"GGUF: expected {len(tokens)} token types, got {len(types)}")
    return Vocabulary(tokens, types)


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What BPE merges, best first. ModelLoadError."""
    found = list_of(str, "merges", metadata.get("tokenizer.ggml.merges"))
    pairs = (merge.partition(" ") for merge in found)
    return [(left, right) for left, _, right in pairs]


def token_index(value: Any, num_tokens: int, key: str) -> int:
    """`value` as a token id below `num_tokens`. ModelLoadError naming the key: also for -1, since
    a file without such a token leaves the key out."""
    if type(value) is not int or not 0 <= value < num_tokens:  # bool is no id
        raise ModelLoadError(
            f"GGUF: expected {key} to be a whole number below {num_tokens} tokens, "
            f"got {value!r:.100}"
        )
    return value


def special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id in `tokenizer.ggml.{name}_token_id`; None if there is none. ModelLoadError."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    return None if value is None else token_index(value, num_tokens, key)


def gguf_eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end a text, a turn or a message: those that the file declares, and those that
    bear a name known for it. ModelLoadError."""
    has_tokens = "tokenizer.ggml.tokens" in metadata  # else another tokenizer is used
    vocabulary = read_vocabulary(metadata) if has_tokens else Vocabulary([], [])
    size = len(vocabulary.tokens) if has_tokens else MAX_TOKEN_ID
    ids = {special_id(metadata, name, size) for name in ("eos", "eot", "eom")}
    known = {
        token_id
        for token_id, (token, kind) in enumerate(vocabulary.entries())
        if token in END_TOKENS and kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }
    if known:  # SmolLM2's <|endoftext|> is its unknown token and ends nothing
        ids |= known - {special_id(metadata, "unknown", size)}
    return frozenset(token_id for token_id in ids if token_id is not None)


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The flag `tokenizer.ggml.{name}`, or the default if the file doesn't say. ModelLoadError."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise unexpected(name, "true or false", value)
    return value


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name. ModelLoadError."""
    found: dict[str, str] = {}
    for key, source in metadata.items():
        if source is not None and (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")):
            if not isinstance(source, str):
                raise ModelLoadError(f"GGUF: expected {key} to be a string, got {source!r:.100}")
            name = key.removeprefix(_TEMPLATE).removeprefix(".") or DEFAULT
            if key == _TEMPLATE or name not in found:
                found[name] = source
    return found


def list_of(kind: type, name: str, value: Any) -> list[Any]:
    """`value`, if it is a list of that kind and nothing else (bool is no int). ModelLoadError."""
    if not isinstance(value, list) or set(map(type, value)) - {kind}:
        raise unexpected(name, f"a list of {kind.__name__}", value)
    return value


def unexpected(name: str, expected: str, got: Any) -> ModelLoadError:
    return ModelLoadError(
        f"GGUF: expected tokenizer.ggml.{name} to be {expected}, got {got!r:.100}; "
        "convert the model again"
    )
