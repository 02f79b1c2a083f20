"""Chat templates: messages → prompt text, by the checkpoint's Jinja template.

Owns the sandbox. Knows nothing about tokens. Invariant: the same template and messages give the
text that `transformers`' apply_chat_template gives; what the template does wrong is the request's
error, never the engine's.

A template comes with the checkpoint, which the operator chose; messages come from clients. The
sandbox keeps the template from the interpreter, and rendering stops at MAX_RENDERED_CHARS. Jinja
has no unbounded loop and limits `range` to 100,000; the time of nested loops is not bounded
further.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is
    only a scope around its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled template. `special_tokens` are the names a template may use: bos_token, ….

    Raises ModelLoadError when the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            # Compiling computes nothing of the template: "a" * 10**9 is a constant too.
            optimized=False,
            finalize=_unchanged,
        )
        environment.filters["tojson"] = _tojson
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
        **kwargs: Any,
    ) -> str:
        """The prompt text. InvalidRequestError(param="messages") when the template refuses."""
        variables = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": template_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise jinja2.TemplateRuntimeError(
                        f"the prompt exceeds {MAX_RENDERED_CHARS} characters"
                    )
                pieces.append(piece)
        # The template is a program run on client data: it may raise anything.
        except Exception as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refused them: {error}", param="messages"
            ) from error
        return "".join(pieces)


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
