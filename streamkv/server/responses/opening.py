"""From a request's body to a response that can begin: what both faces of the API share.

Owns the order of the checks, the prompt, and the record under which the response is found. Knows
nothing of lanes, nor of how its events travel. Invariant: whatever is wrong with a request is
raised here, or when its source is entered, before the response has been created for anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from starlette.requests import HTTPConnection

from ...engine.admission import check_num_messages
from ...engine.async_engine import AsyncEngine
from ...engine.outputs import TokenDelta
from ...engine.stream import TokenStream
from ...errors import InvalidRequestError
from ...protocol import SamplingParams
from ..answer import Source
from ..answer_format import AnswerPlan, plan_answer
from ..deltas import cut
from ..ids import engine_id_of
from ..messages import wants_reasoning
from ..metrics import metrics_of, observed
from ..request_fields import limit_tokens
from ..wire import ready_engine
from .input import read_turn
from .items import InputItem, TemplateMessage
from .object import Response, response_id_of
from .prompt import Template, encode_truncated, to_messages
from .request import ResponseRequest
from .store import Record, ResponseStore, Shelves, Turn, store_of
from .tools import read_tool_choice, read_tools
from .writer import ResponseWriter

_PREPARING = SamplingParams(max_tokens=1, temperature=0.0)  # whose one token is nobody's


class Asked:
    """A request that was checked: its turn of the conversation, and what the model reads."""

    def __init__(self, engine: AsyncEngine, body: ResponseRequest, turn: Turn) -> None:
        self.engine = engine
        self.body = body
        self.turn = turn
        tools = read_tools(body.tools)
        choice = read_tool_choice(body.tool_choice, tools)
        structure = body.answer_structure()
        variables = body.template_variables()
        self.plan: AnswerPlan = plan_answer(
            engine.tokenizer,
            tools=tools,
            choice=choice.choice,
            name=choice.name,
            allowed=choice.allowed,
            parallel=body.parallel_tool_calls is not False,
            structured=None if structure is None else structure.outputs,
            thinks=wants_reasoning(variables),
        )
        self.template = Template(self.plan.template_tools, variables)

    async def messages(self) -> list[TemplateMessage]:
        """The conversation as a template reads it, without the instructions. Of one that may be cut
        no more than the context has tokens, and the last turn."""
        return await to_messages(self.turn, self.engine.info.max_model_len)

    @property
    def instructions(self) -> list[TemplateMessage]:
        """Those of this request: they never come from a previous response."""
        text = self.body.instructions
        return [] if text is None else [{"role": "system", "content": text}]

    async def prompt(self) -> list[int]:
        """InvalidRequestError names the field at fault."""
        body = self.body
        if body.truncation != "auto":
            check_num_messages(range(self.turn.num_items), self.engine.info, "input")
        messages = await self.messages()
        if body.truncation == "auto":
            return await encode_truncated(
                self.engine,
                messages,
                self.template,
                fixed=self.instructions,
                max_output_tokens=body.max_output_tokens,
            )
        return await self.template.encode(self.engine, [*self.instructions, *messages])


class OpenedResponse(NamedTuple):
    """A response that has not begun: enter `source`, and `writer` makes the events of its deltas.
    It is found by its record from now on; `abandon` it if it isn't admitted."""

    asked: Asked
    writer: ResponseWriter
    record: Record
    source: Source

    def abandon(self) -> None:
        if self.record.store is not None:
            self.record.store.abandon(self.record)

    async def collect(self, streams: Sequence[TokenStream]) -> Response:
        """The whole response, when it has ended. Raises what breaks it."""
        writer = self.writer
        writer.begin(streams)
        try:
            await _collect(streams[0], writer)
            writer.end()
        except BaseException as error:
            writer.fail(error)
            raise
        return writer.response


async def _collect(stream: TokenStream, writer: ResponseWriter) -> None:
    if stream.sampling.logprobs is not None:  # too many to wait for the end
        async for delta in stream:
            writer.push(0, delta)
        return
    for whole in await stream.collect():
        delta = TokenDelta(0, whole.text, whole.token_ids, finish_reason=whole.finish_reason)
        for piece in cut(delta):
            writer.push(0, piece)
            await asyncio.sleep(0)


async def ask(
    connection: HTTPConnection,
    body: ResponseRequest,
    shelves: Shelves,
    *,
    previous: Turn | None = None,
    before: Sequence[InputItem] = (),
) -> Asked:
    """Check a request, and find what it goes on from (`previous`, where it is known). `before`:
    items that come before its input. InvalidRequestError names the field at fault."""
    engine = ready_engine(connection)
    body.check()
    if previous is None:
        previous = shelves.previous(body.previous_response_id)
    given = _given_items(body, goes_on=previous is not None or bool(before))
    response_id = response_id_of(body.request_id)
    turn = await read_turn(response_id, before, given, shelves, previous)
    return Asked(engine, body, turn)


def _given_items(body: ResponseRequest, *, goes_on: bool) -> Sequence[InputItem]:
    if isinstance(body.input, str):
        return [InputItem(role="user", content=body.input)]
    items = body.input or []
    if not items and not goes_on and (body.generates or body.instructions is None):
        raise InvalidRequestError("input: expected text or at least one item", param="input")
    return items


async def open_response(
    connection: HTTPConnection,
    asked: Asked,
    shelves: Shelves,
    store: ResponseStore | None,
    *,
    prompt: Sequence[int] | None = None,
) -> OpenedResponse:
    """Make a response of it, which is kept in that store. `prompt`: its tokens, where they are
    known. InvalidRequestError names the field at fault."""
    engine, body, plan = asked.engine, asked.body, asked.plan
    sampling = body.sampling_params(engine.sampling_defaults)
    with body.own_field_names():
        if prompt is None:
            prompt = await asked.prompt()
        await plan.see_prompt(prompt)
        how = plan.sampling(sampling) if body.generates else _PREPARING
    response = body.to_response(
        asked.turn.response_id,
        body.model or engine.model_ids[0],
        sampling,
        is_stored=store is store_of(connection),
    )
    stream = engine.generate(
        prompt,
        limit_tokens(how, engine, len(prompt)),
        request_id=engine_id_of(response.id),
        **body.for_engine(connection),
    )
    writer = ResponseWriter(response, reader=plan.reader(), generates=body.generates)
    record = Record(shelves.owner, asked.turn, writer, store)
    writer.on_end = record.end
    if store is not None:
        store.begin(record)
    source = _named(observed(metrics_of(connection), stream), body)
    return OpenedResponse(asked, writer, record, source)


@asynccontextmanager
async def _named(source: Source, body: ResponseRequest) -> AsyncIterator[TokenStream]:
    async with AsyncExitStack() as stack:
        with body.own_field_names():
            stream = await stack.enter_async_context(source)
        yield stream
