"""The chat templates of a checkpoint, by name, and which one renders a request.

Owns the choice. Knows nothing about tokens. Invariant: a request's own template is rendered as it
is; with the model's, tools, calls and their results are in the prompt also where the template knows
none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidRequestError
from .chat_messages import template_messages
from .chat_template import ChatTemplate, client_template
from .untaught_tools import tell_of_tools, write_calls

DEFAULT = "default"
TOOL_USE = "tool_use"  # used when tools are given


class ChatTemplates:
    """Compiled templates. ModelLoadError when one isn't valid Jinja."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._by_name = {
            name: ChatTemplate(source, special_tokens) for name, source in sources.items()
        }
        self.default = self._by_name.get(DEFAULT)
        self.for_tools = self._by_name.get(TOOL_USE, self.default)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `chat_template` is the name of one of the model's, or Jinja.
        InvalidRequestError."""
        template = self.default if tools is None else self.for_tools
        if chat_template is not None:
            template = self._by_name.get(chat_template)
        if template is None and chat_template is not None:
            template = client_template(chat_template, self._special_tokens)
        elif template is None:
            raise InvalidRequestError(
                "messages: expected a model with a chat template, but this one has none; "
                "write the prompt yourself and use the completions endpoint",
                param="messages",
            )
        else:
            messages, tools = _as_known(template, template_messages(messages), tools)
        return template.render(messages, tools=tools, **kwargs)


def _as_known(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools as the template can write them."""
    if not template.knows_calls:
        messages = write_calls(messages)
    if not tools or template.knows_tools:
        return messages, tools
    return tell_of_tools(messages, tools), None
