"""Tokenizer: text ↔ token ids, for one checkpoint.

Owns the `tokenizers` object, the token → bytes table, the special ids and the chat template.
Knows nothing about requests, streams or models. Invariant: immutable after construction, so any
thread may use it.

What is trusted where sources differ: a folder's tokenizer.json as it stands; a GGUF file's tokens
and merges, cut into words by the rule that its `tokenizer.ggml.pre` names (see `gguf_vocab`).
`transformers`' own conversion of GGUF tokenizers is no authority on that rule: for names it has no
entry for, `smollm` among them, it falls back to GPT-2's, which keeps runs of digits together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InvalidRequestError, ModelLoadError
from . import gguf_vocab, token_bound, token_bytes
from .chat_template import ChatTemplate

MAX_TOKEN_ID = 2**31 - 1
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_OLDER_FILES = (  # one of these is what a tokenizer from before tokenizer.json is converted from
    *("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    "tekken.json",
)


class Tokenizer:
    """Text to token ids and back. Build it with `from_folder` or `from_gguf`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None,
        chat_template: ChatTemplate | None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry its training's limits
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.chat_template = chat_template
        self.joining = token_bytes.read_joining(backend.decoder)
        self._bytes = token_bytes.build_table(
            backend.get_vocab(with_added_tokens=True),
            {token_id: token.content for token_id, token in added.items()},
            self.joining,
            vocab_size,
        )
        self._bound = token_bound.read_bound(backend, self.joining, self._bytes)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face format. ModelLoadError."""
        backend = _load_backend(path)
        config = _read_json(path / "tokenizer_config.json")
        specials = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
        eos_ids = _eos_ids(path)
        if "eos_token" in specials:
            eos_id = backend.token_to_id(specials["eos_token"])
            eos_ids |= set() if eos_id is None else {eos_id}
        source = _template_source(path, config)
        return cls(
            backend,
            vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            eos_token_ids=eos_ids,
            bos_token_id=backend.token_to_id(specials.get("bos_token", "")),
            chat_template=None if source is None else ChatTemplate(source, specials),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer a GGUF file carries. ModelLoadError.

        `metadata` is key → value; end tokens are those of eos_token_id, eot_token_id and
        eom_token_id (end of text, of turn, of message).
        """
        backend = gguf_vocab.build_backend(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def special_id(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            value = metadata.get(key)
            return None if value is None else gguf_vocab.token_index(value, len(tokens), key)

        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: special_id(key) for name, key in names.items()}
        specials = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
        ends = (special_id(name) for name in ("eos", "eot", "eom"))
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str | None):
            raise ModelLoadError(
                f"GGUF: expected tokenizer.chat_template to be a string, got {source!r:.100}"
            )
        return cls(
            backend,
            vocab_size=len(tokens),
            eos_token_ids=(i for i in ends if i is not None),
            bos_token_id=ids["bos"],
            chat_template=None if source is None else ChatTemplate(source, specials),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text become their ids; `add_special_tokens`
        adds those the checkpoint puts around a text (usually none, or a beginning token). Bytes
        that the vocabulary has no token for are dropped, as the model's own tokenizer does."""
        # A batch of one: unlike `encode`, it lets other threads run Python meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def min_num_tokens(self, text: str) -> int:
        """At least so many tokens `encode` would give, by the length of the text; 0 where this
        tokenizer's rules promise nothing."""
        return self._bound.min_num_tokens(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole sequences; for streams use `Detokenizer`."""
        # As in `encode`: `decode` would keep other threads from running.
        (text,) = self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the byte stream; nothing for ids without a token, which a model
        with a padded vocabulary can sample."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token alone, as shown beside its log-probability; half characters become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. InvalidRequestError(param="messages") if the model
        has no chat template or its template refuses the messages."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "messages: expected a model with a chat template, but this one has none; "
                "write the prompt yourself and use the completions endpoint",
                param="messages",
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    is_there = _is_there(file)
    if not is_there and not any((path / name).is_file() for name in _OLDER_FILES):
        raise ModelLoadError(
            f"{path}: expected a tokenizer, got no tokenizer.json and none of "
            f"{', '.join(_OLDER_FILES)}; get the whole checkpoint"
        )
    try:
        if is_there:
            return tokenizers.Tokenizer.from_file(str(file))
        # Only tokenizers of the formats before tokenizer.json need the conversion, and its import.
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(path, local_files_only=True)
        backend = getattr(converted, "backend_tokenizer", None)
    except Exception as error:  # `tokenizers` raises bare Exception, `transformers` anything
        reason = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"{path}: the tokenizer can't be read: {reason}") from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"{path}: expected tokenizer.json or a tokenizer that converts to it, "
            f"got {type(converted).__name__}"
        )
    return backend


def _is_there(file: Path) -> bool:
    """Whether there is such a file. ModelLoadError for what may never end when it is read, such
    as a pipe."""
    if file.exists() and not file.is_file():
        raise ModelLoadError(f"{file}: expected a regular file")
    return file.is_file()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file}: expected text in UTF-8, got {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no such file."""
    if not _is_there(file):
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: expected JSON, got {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name → text of the special tokens; each is written as a string or as {"content": …}."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(path: Path) -> set[int]:
    """The union of what the model's two configs declare, each an int, a list or absent.

    A negative id is refused: a model without an end token leaves the key out, or writes null.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = _read_json(file).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:  # bool is no id
                raise ModelLoadError(
                    f"{file}: expected eos_token_id to be whole numbers from 0 to {MAX_TOKEN_ID}, "
                    f"got {token_id!r:.100}"
                )
            ids.add(token_id)
    return ids


def _template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, chat_template.json or tokenizer_config.json. Where
    there are several by name, the one called default."""
    file = path / "chat_template.jinja"
    if _is_there(file):
        return _read_text(file)
    source = _read_json(path / "chat_template.json").get("chat_template")
    source = config.get("chat_template") if source is None else source
    if source is None or isinstance(source, str):
        return source
    by_name: dict[str, str] = {}
    for entry in source if isinstance(source, list) else [source]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                by_name[name] = template
            case _:
                raise ModelLoadError(
                    f"{path}: expected the chat template to be a string or a list of templates "
                    f"with names, got {source!r:.100}"
                )
    return by_name.get("default")
