"""How an answer is to be written, and read: reasoning, tool calls, and what its text must match.

Owns the plan of one request's answers, for every endpoint, and the reading of each. Knows no
endpoint's fields and no transport. Invariants: an answer that must be calls, or must match
something, does so after its reasoning, from its first token if the prompt leaves no place for any;
calls of tools that are `strict` obey their schemas; an answer that must be calls has no content;
what is read of an answer, the count of its reasoning's tokens included, doesn't depend on how it
came in pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..engine.encoding import decode_whole
from ..errors import InvalidRequestError
from ..protocol import SamplingParams
from ..sampling import StructuredOutputs
from ..text.answer_parts import AnswerParser, ContentPart, Part, ToolCallPart
from ..text.reasoning import ReasoningFormat, Stage
from ..text.tokenizer import Tokenizer
from ..text.tool_calls import ToolFormat, answer_parser
from ..text.tool_grammar import Rules

_TAIL_LEN = 16  # tokens of a prompt's end: the mark that begins reasoning, and what follows it


class AnswerPlan:
    """One request's. Made by `plan_answer`; `see_prompt` tells it what the answers go on from."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        tool_format: ToolFormat | None,
        *,
        required: bool,
        name: str | None,
        parallel: bool,
        structured: StructuredOutputs | None,
        thinks: bool,
    ) -> None:
        self.reasoning: ReasoningFormat | None = tokenizer.reasoning_format
        self.template_tools = list(tools) or None  # what the chat template is to show
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._required = required
        self._name = name
        self._parallel = parallel
        self._structured = structured
        self._thinks = thinks
        self._stage = Stage.NOT_BEGUN  # of the prompt

    @property
    def needs_reader(self) -> bool:
        """Whether an answer is more than its text."""
        return self._tool_format is not None or self.reasoning is not None

    async def see_prompt(self, token_ids: Sequence[int], *, continued: str = "") -> None:
        """Look how far the prompt has gone with the reasoning; `continued`: what its last message
        says, if the answer goes on with that."""
        if self.reasoning is None:
            return
        tail = token_ids[-_TAIL_LEN - len(continued.encode()) :]
        text = await decode_whole(self._tokenizer, tail)
        self._stage = self.reasoning.stage(text, continued=continued)
        if self._stage is Stage.NOT_BEGUN and not self._thinks:
            self._stage = Stage.OVER

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """How to sample such answers. InvalidRequestError."""
        if sampling.use_beam_search:
            self._check_beams()
        changes: dict[str, Any] = {"structured_outputs": self._grammar()}
        formats = (self._tool_format, self.reasoning)
        if any(item is not None and item.shows_special_tokens for item in formats):
            changes["skip_special_tokens"] = False
        return sampling.clone(**changes)

    def reader(self) -> AnswerReader | None:
        """What reads one answer; None where all of it is content."""
        # One that is free may reason against all that it was told, and is read as it comes.
        is_free = self._structured is None and not self.must_call
        reasoning = self.reasoning if is_free else self._leading_reasoning
        parser = answer_parser(
            self._tokenizer,
            tools=self._tool_format is not None,
            reasoning=reasoning is not None,
            prompt_ends_in_reasoning=self._is_open,
        )
        if parser is None:
            return None
        count = None
        if reasoning is not None:
            count = _ReasoningCount(self._tokenizer, reasoning, self._is_open)
        return AnswerReader(parser, count, parallel=self._parallel, only_calls=self.must_call)

    @property
    def must_call(self) -> bool:
        """Whether an answer has to be one or more calls."""
        return self._required and self._tool_format is not None

    @property
    def _is_open(self) -> bool:
        """Whether the prompt ends within reasoning."""
        return self._stage is Stage.OPEN

    @property
    def _leading_reasoning(self) -> ReasoningFormat | None:
        """What an answer that must match something may begin with."""
        return None if self._stage is Stage.OVER else self.reasoning

    def _grammar(self) -> StructuredOutputs | None:
        """What answers must match."""
        structured, tool_format = self._structured, self._tool_format
        if tool_format is None:
            if structured is None or self._leading_reasoning is None:
                return structured
            return self._after_reasoning("@answer", structured)
        if self._required:
            return StructuredOutputs(lark=self._calls(tool_format, required=True))
        if structured is not None:
            calls = self._calls(tool_format, required=True, reasoning=False)
            return self._after_reasoning(f"(%lark {{\n{calls}\n}} | @answer)", structured)
        if self._strict_names:
            return StructuredOutputs(lark=self._calls(tool_format, required=False))
        return None

    @property
    def _strict_names(self) -> list[str]:
        """Of the tools whose calls obey their schemas."""
        functions = (tool["function"] for tool in self.template_tools or ())
        return [function["name"] for function in functions if function.get("strict")]

    def _check_beams(self) -> None:
        """InvalidRequestError for calls that must be made, or obey schemas: beams follow none."""
        if self.must_call:
            raise InvalidRequestError(
                'tool_choice: expected "auto" or "none" with use_beam_search, got one by which the '
                "answer must be a call; leave it out",
                param="tool_choice",
            )
        if self._tool_format is not None and self._structured is None and self._strict_names:
            raise InvalidRequestError(
                "tools: expected none with strict: true with use_beam_search, got "
                f"{self._strict_names[0]!r:.100}; leave strict out",
                param="tools",
            )

    def _calls(self, tool_format: ToolFormat, *, required: bool, reasoning: bool = True) -> str:
        """The grammar of answers that are calls, or text if they may be."""
        return tool_format.grammar(
            self.template_tools or (),
            required=required,
            name=self._name,
            parallel=self._parallel,
            reasoning=reasoning and self._leading_reasoning is not None,
            prompt_ends_in_reasoning=self._is_open,
        )

    def _after_reasoning(self, answer: str, structured: StructuredOutputs) -> StructuredOutputs:
        """The same for what is no reasoning; `answer` says where it stands."""
        rules = Rules(self._tokenizer.special_ids, (), parallel=False)
        frame = rules.text(answer, self._leading_reasoning, self._is_open)
        return msgspec.structs.replace(structured, frame=frame)


def plan_answer(
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    choice: Literal["none", "auto", "required"] = "auto",
    name: str | None = None,
    allowed: Collection[str] | None = None,
    parallel: bool = True,
    structured: StructuredOutputs | None = None,
    thinks: bool = True,
) -> AnswerPlan:
    """The plan of answers that may call `tools` (with `allowed` of these only), must ("required"),
    or must call the one with that `name`; other answers match `structured`. With "none" the model
    is told of no tools. Without `parallel` there is one call in an answer, at most. Unless the
    model `thinks`, it is to begin no reasoning.

    InvalidRequestError names `tools`.
    """
    if choice == "none":
        tools = ()
    if allowed is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    return AnswerPlan(
        tokenizer,
        tools,
        _readable_format(tokenizer) if tools else None,
        required=choice == "required",
        name=name,
        parallel=parallel,
        structured=structured,
        thinks=thinks,
    )


def tool_field_names(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What errors of the grammar of calls are to name: the client sent tools and no grammar."""
    found = (tool.get("function", tool).get("name") for tool in tools)
    shown = ", ".join(repr(name) for name in found if isinstance(name, str))[:300]
    expected = f"expected parameters (of {shown})".replace("\\", "")
    return {
        "structured_outputs: expected lark": f"tools: {expected}",
        "structured_outputs": "tools",
    }


def _readable_format(tokenizer: Tokenizer) -> ToolFormat:
    if tokenizer.tool_format is None:
        raise InvalidRequestError(
            "tools: this model's chat template tells it of tools in a way that isn't read here; "
            'leave them out, or send tool_choice "none"',
            param="tools",
            code="unsupported",
        )
    return tokenizer.tool_format


class AnswerReader:
    """Reads one answer. Owned by whoever owns the answer."""

    def __init__(
        self,
        parser: AnswerParser,
        count: _ReasoningCount | None,
        *,
        parallel: bool,
        only_calls: bool = False,
    ) -> None:
        self.num_calls = 0
        self._parser = parser
        self._count = count
        self._parallel = parallel
        self._only_calls = only_calls  # what looks like content is a call's syntax, cut off

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens so far, marks included."""
        return self._count.num_tokens if self._count is not None else 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        """What is certain after this text, and these tokens that came with it."""
        if self._count is not None:
            self._count.push(token_ids)
        return self._shown(self._parser.push(text))

    def finish(self) -> list[Part]:
        """The end of the answer."""
        return self._shown(self._parser.finish())

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCallPart):
                if part.index and not self._parallel:
                    continue
                self.num_calls = max(self.num_calls, part.index + 1)
            elif self._only_calls and isinstance(part, ContentPart):
                continue
            shown.append(part)
        return shown


class _ReasoningCount:
    """Counts the tokens of an answer's reasoning, with the marks around it."""

    def __init__(self, tokenizer: Tokenizer, marks: ReasoningFormat, is_open: bool) -> None:
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._opening, self._closing = marks.opening.encode(), marks.closing.encode()
        self._is_open = is_open
        self._is_over = False
        self._num_before = 0  # tokens of what may become the opening mark
        self._tail = b""

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._tail += self._tokenizer.token_bytes(token_id)
            if self._is_open:
                self.num_tokens += 1
                self._is_over = self._closing in self._tail
                self._tail = self._tail[-len(self._closing) :]
            else:
                self._look_for_opening()

    def _look_for_opening(self) -> None:
        self._num_before += 1
        self._tail = begun = self._tail.lstrip()
        if begun.startswith(self._opening):
            self._is_open = True
            self.num_tokens = self._num_before
            self._is_over = self._closing in begun
        elif not self._opening.startswith(begun):
            self._is_over = True
