"""Chat templates: messages → prompt text, by the checkpoint's Jinja template.

Owns the sandbox. Knows nothing about tokens. Invariant: the same template and messages give the
text that `transformers`' apply_chat_template gives; what the template does wrong is the request's
error, never the engine's.

A template comes with the checkpoint, which the operator chose, or from a client where the operator
allows it; messages come from clients. The sandbox keeps the template from the interpreter, and
rendering stops at MAX_RENDERED_CHARS. Jinja has no unbounded loop and limits `range` to 100,000;
the time of nested loops is not bounded further, but for a template with `max_seconds`: loops and
calls look at the clock, and products and powers are no larger than a prompt. What else takes long
or much memory in one operation, a sandbox can't know.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequestError, ModelLoadError, one_line
from .chat_messages import template_messages

MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_CLIENT_TEMPLATE_CHARS = 64 * 1024
MAX_CLIENT_SECONDS = 1.0
MAX_CLIENT_BITS = 4096  # of whole numbers
_NUM_CLIENT_TEMPLATES = 16  # kept compiled
# Where the last message goes on. The space at the end: where a template strips the message, that is
# missing, and tells of it.
_MARK = "<<the message goes on here>> "

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is
    only a scope around its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _TimedEnvironment(ImmutableSandboxedEnvironment):
    """One whose templates stop at the deadline, and whose products stay small."""

    intercepted_binops = frozenset({"*", "**"})

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "_timed", [], [], None, None)
        return super()._generate(source, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(*args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _is_too_large(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template. `special_tokens` are the names a template may use: bos_token, ….
    `max_seconds` bounds the time of rendering, as far as a sandbox can.

    Raises ModelLoadError when the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        max_seconds: float | None = None,
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.knows_tools = re.search(r"\btools\b", source) is not None
        self.knows_calls = "tool_calls" in source
        self.knows_documents = re.search(r"\bdocuments\b", source) is not None
        self._max_seconds = max_seconds
        make = ImmutableSandboxedEnvironment if max_seconds is None else _TimedEnvironment
        environment = make(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            # Compiling computes nothing of the template: "a" * 10**9 is a constant too.
            optimized=False,
            finalize=_unchanged,
        )
        environment.filters["tojson"] = _tojson
        environment.filters["_timed"] = _timed
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"chat template: expected valid Jinja, got {one_line(error.message)} at line "
                f"{error.lineno}; mend the checkpoint's, or name a file with --chat-template"
            ) from None
        # Python's compiler has limits of its own, and an error for each.
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelLoadError(
                f"chat template: can't be compiled, {type(error).__name__}: {one_line(error)}; "
                "mend the checkpoint's, or name a file with --chat-template"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text; with `continue_final_message` it ends where the last message's does.
        InvalidRequestError(param="messages") when the template refuses; a client's is at fault
        itself (param="chat_template"); param="documents" for some that would be left out."""
        found = template_messages(messages)
        if kwargs.get("documents") and not self.knows_documents:
            raise InvalidRequestError(
                "documents: expected none, as this model's chat template has no place for them; "
                "put their text into a message",
                param="documents",
            )
        if continue_final_message:
            _check_continued(found, add_generation_prompt)
            found[-1]["content"] += _MARK
        variables = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": found,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._generate(variables)
        # The template is a program run on client data: it may raise anything.
        except Exception as error:
            param, whose = ("messages", "the model's chat template refused them")
            if self._max_seconds is not None:
                param, whose = ("chat_template", "it failed with these messages")
            raise InvalidRequestError(f"{param}: {whose}: {error}", param=param) from error
        return _up_to_mark(text) if continue_final_message else text

    def _generate(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        with _time_limit(self._max_seconds):
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateRuntimeError(
                        f"the prompt exceeds {MAX_RENDERED_CHARS} characters"
                    )
                pieces.append(piece)
        return "".join(pieces)


def client_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template that came with a request; those used last are kept. InvalidRequestError."""
    if len(source) > MAX_CLIENT_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"chat_template: expected at most {MAX_CLIENT_TEMPLATE_CHARS} characters, got "
            f"{len(source)}; send a shorter one",
            param="chat_template",
        )
    try:
        return _client_template(source, tuple(special_tokens.items()))
    except ModelLoadError as error:
        reason = error.message.removeprefix("chat template: ").partition("; mend")[0]
        raise InvalidRequestError(
            f"chat_template: {reason}; send another, or leave it out for the model's",
            param="chat_template",
        ) from None


@functools.lru_cache(_NUM_CLIENT_TEMPLATES)
def _client_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens), max_seconds=MAX_CLIENT_SECONDS)


def _check_continued(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: expected add_generation_prompt to be off beside it: the last "
            "message can't both be continued and be followed by another",
            param="continue_final_message",
        )
    if not messages:
        raise InvalidRequestError(
            "messages: expected a last message to continue, got none", param="messages"
        )


def _up_to_mark(text: str) -> str:
    """The prompt up to the mark; without the spaces before it if the template strips messages."""
    begin = text.rfind(_MARK.rstrip())
    if begin < 0:
        raise InvalidRequestError(
            "messages: the chat template leaves the last one out, so it can't be continued; leave "
            "continue_final_message out",
            param="messages",
        )
    return text[:begin] if text.startswith(_MARK, begin) else text[:begin].rstrip()


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise jinja2.TemplateRuntimeError("it takes too long")


def _timed(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


def _is_too_large(operator: str, left: Any, right: Any) -> bool:
    """Whether a product or power has too many digits, characters or items."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            return left.bit_length() + right.bit_length() > MAX_CLIENT_BITS
        return left.bit_length() * right > MAX_CLIENT_BITS
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int) or not hasattr(left, "__len__"):
        return False
    return len(left) * right > MAX_RENDERED_CHARS


@jinja2.pass_context
def _unchanged(context: jinja2.runtime.Context, value: Any) -> Any:
    """What is written, as it is. It asks for the context, so that it can't run at compile time."""
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
