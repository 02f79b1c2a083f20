"""Tokenizer: text ↔ token ids, for one checkpoint.

Owns the `tokenizers` object, the token → bytes table, the special ids and the chat templates.
Knows nothing about requests, streams or models. Invariant: immutable after construction, so any
thread may use it.

What is trusted where sources differ: a folder's tokenizer.json, and which of its tokens the configs
beside it call special; a GGUF file's tokens and merges, cut into words by the rule that its
`tokenizer.ggml.pre` names (see `pre_tokenizers`).
`transformers`' own conversion of GGUF tokenizers is no authority on that rule: for names it has no
entry for, `smollm` among them, it falls back to GPT-2's, which keeps runs of digits together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from . import gguf_metadata, gguf_vocab, reasoning, token_bound, token_bytes, tool_calls
from .chat_template import ChatTemplate
from .chat_templates import DEFAULT, ChatTemplates
from .control_text import ControlText
from .tokenizer_folder import read_tokenizer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """Text to token ids and back. Build it with `from_folder` or `from_gguf`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        """`special_tokens`: "bos_token", … → its text. `chat_templates`: name → Jinja."""
        backend.no_truncation()  # a tokenizer.json may carry its training's limits
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_tokens = special_tokens
        self.bos_token_id = backend.token_to_id(special_tokens.get("bos_token", ""))
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.controls = ControlText(backend)
        self.chat_templates = ChatTemplates(chat_templates, special_tokens)
        self.joining = token_bytes.read_joining(backend.decoder)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.special_ids = {t.content: i for i, t in added.items() if t.special}
        template = self.chat_templates.for_tools
        self.reasoning_format = reasoning.find_format(
            None if template is None else template.source, vocab, self.special_ids
        )
        self.tool_format = tool_calls.find_format(template, self.special_ids, self.reasoning_format)
        self.pieces = token_bytes.build_table(
            vocab,
            {token_id: token.content for token_id, token in added.items()},
            self.joining,
            vocab_size,
        )
        # What tokens add to a text between whole characters, filled as they come: with special
        # tokens left out, and with all. Any thread may do so, as it is the same each time.
        self.shown_texts: dict[int, str] = {}
        self.all_texts: dict[int, str] = {}
        self._bound = token_bound.read_bound(backend, vocab, self.joining, self.pieces)

    @classmethod
    def from_folder(
        cls,
        path: Path,
        *,
        chat_template: str | None = None,
        more_eos_ids: Collection[int] = (),
    ) -> Tokenizer:
        """The tokenizer of a folder in Hugging Face format. `chat_template` is used instead of the
        folder's. ModelLoadError."""
        folder = read_tokenizer_folder(path, chat_template)
        ids = folder.backend.get_vocab(with_added_tokens=True).values()
        return cls(
            folder.backend,
            vocab_size=max(ids, default=-1) + 1,
            eos_token_ids=folder.eos_token_ids.union(more_eos_ids),
            special_tokens=folder.special_tokens,
            chat_templates=folder.chat_templates,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        chat_template: str | None = None,
        more_eos_ids: Collection[int] = (),
    ) -> Tokenizer:
        """The tokenizer a GGUF file carries. `chat_template` is used instead of the file's.
        ModelLoadError."""
        backend = gguf_vocab.build_backend(metadata)
        size = gguf_vocab.vocab_size(metadata, backend)
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: gguf_metadata.special_id(metadata, key, size) for name, key in names.items()}
        texts = {name: backend.id_to_token(i) for name, i in ids.items() if i is not None}
        templates = gguf_metadata.chat_templates(metadata)
        return cls(
            backend,
            vocab_size=size,
            eos_token_ids=gguf_metadata.gguf_eos_ids(metadata).union(more_eos_ids),
            special_tokens={
                f"{name}_token": text for name, text in texts.items() if text is not None
            },
            chat_templates=templates if chat_template is None else {DEFAULT: chat_template},
        )

    def to_transformers(self, max_model_len: int) -> PreTrainedTokenizerFast:
        """A copy for programs that use transformers' interface, whose import takes a second."""
        from transformers import PreTrainedTokenizerFast as Theirs

        vocab = self._backend.get_vocab(with_added_tokens=True)
        make: Callable[..., PreTrainedTokenizerFast] = Theirs  # its constructor has no types
        return make(
            tokenizer_object=self._backend,
            chat_template=None if self.chat_template is None else self.chat_template.source,
            clean_up_tokenization_spaces=False,
            model_max_length=max_model_len,
            # Others would be added, with ids that the model doesn't have.
            **{name: text for name, text in self.special_tokens.items() if text in vocab},
        )

    def with_tool_format(self, name: str) -> Tokenizer:
        """The same, of a model that writes calls of tools in the format with that name."""
        other = copy.copy(self)
        other.tool_format = tool_calls.find_format(
            self.chat_templates.for_tools, self.special_ids, self.reasoning_format, name=name
        )
        return other

    @property
    def kind(self) -> str:
        """How it makes tokens, in words."""
        algorithm = type(self._backend.model).__name__
        return f"{'byte-level' if self.joining.byte_level else 'SentencePiece'} {algorithm}"

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
        return self.pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token alone, as shown beside its log-probability; half characters become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The one for requests that don't name another."""
        return self.chat_templates.default

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; `kwargs` are those of `ChatTemplates.render` and
        `ChatTemplate.render`. InvalidRequestError(param="messages") if the model has no chat
        template or its template refuses the messages."""
        return self.chat_templates.render(
            messages, add_generation_prompt=add_generation_prompt, **kwargs
        )
