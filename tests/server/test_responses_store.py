"""Responses that clients come back to: retrieve, cancel, delete, input_items, background."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter
from server.harness import MODEL, Server, fake_runner, serve
from server.responses_client import (
    ORDER,
    answer_text,
    connected,
    create,
    sse_events,
    stream,
    text_of,
)
from server.test_responses_output import CALL, TOOL, saying

from streamkv.server.responses.items import InputItem
from streamkv.server.responses.object import Response as ResponseBody
from streamkv.server.responses.store import Record, ResponseStore, Turn
from streamkv.server.responses.writer import ResponseWriter

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def get(server: Server, path: str, **options: Any) -> httpx.Response:
    with server.client() as client:
        return client.get(f"/v1/responses/{path}", **options)


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


# --- reading ---------------------------------------------------------------------------------


def test_a_response_is_read_again_until_it_is_deleted(server: Server) -> None:
    client = server.openai()
    created = client.responses.create(model=MODEL, input="one", max_output_tokens=4)
    assert (created.model_extra or {})["store"] is True
    found = client.responses.retrieve(created.id)
    assert Response.model_validate_json(found.to_json(), strict=True) == created
    client.responses.delete(created.id)
    for method in ("retrieve", "delete", "cancel"):
        with pytest.raises(openai.NotFoundError) as gone:
            getattr(client.responses, method)(created.id)
        assert (gone.value.code, gone.value.param) == ("response_not_found", "response_id")


def test_what_is_not_stored_is_not_found(server: Server) -> None:
    created = create(server, store=False, max_output_tokens=2)
    assert error_of(get(server, created.id)) == (404, "response_not_found", "response_id")
    with serve(response_store_mib=0) as other:
        created = create(other, store=True, max_output_tokens=2)
        assert (created.model_extra or {})["store"] is False
        assert get(other, created.id).status_code == 404


def test_a_streamed_response_is_stored_as_its_last_event_tells(server: Server) -> None:
    final = stream(server, max_output_tokens=5)[-1].response
    assert Response.model_validate_json(get(server, final.id).content, strict=True) == final


@pytest.mark.parametrize("streams", [False, True])
def test_the_events_of_a_response_that_has_ended_can_be_had_again(
    server: Server, streams: bool
) -> None:
    if streams:
        final = stream(server, max_output_tokens=5)[-1].response
    else:
        final = create(server, max_output_tokens=5)
    events = sse_events(get(server, f"{final.id}?stream=true").text)
    assert [event.type for event in events] == [*ORDER, "response.incomplete"]
    assert text_of(events) == final.output_text and events[-1].response == final
    answer = get(server, f"{final.id}?stream=true&starting_after=2")
    assert error_of(answer)[:2] == (410, "events_dropped")
    with server.openai().responses.stream(response_id=final.id) as helper:
        snapshots = [e.snapshot for e in helper if e.type == "response.output_text.delta"]
    assert snapshots == [final.output_text]


def test_all_kinds_of_items_are_told_again() -> None:
    with saying(f"<think>a</think>b{CALL}") as server:
        final = create(server, tools=[TOOL])
        events = sse_events(get(server, f"{final.id}?stream=true").text)
    assert events[-1].response == final
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = {event.type for event in events if event.type.endswith(".delta")}
    assert len(kinds) == 3, "of text, reasoning and arguments"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output


def test_a_resumable_stream_is_read_on_from_an_event(server: Server) -> None:
    events = stream(server, max_output_tokens=5, stream_options={"resumable": True})
    response_id = events[0].response.id
    for after in (0, 3, len(events) - 2):
        answer = get(server, f"{response_id}?stream=true&starting_after={after}")
        assert sse_events(answer.text) == events[after + 1 :]
    assert get(server, f"{response_id}?stream=true&starting_after={len(events) - 1}").text == ""
    answer = get(server, f"{response_id}?stream=true&starting_after={len(events)}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
    with server.openai().responses.stream(response_id=response_id, starting_after=2) as helper:
        assert [event.sequence_number for event in helper] == list(range(3, len(events)))


def test_a_response_belongs_to_the_key_that_asked_for_it() -> None:
    with serve(api_key=("one", "two")) as server:
        mine = server.openai("one").responses.create(model=MODEL, input="hi", max_output_tokens=2)
        other = server.openai("two").responses
        for call in (other.retrieve, other.cancel, other.delete, other.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(mine.id)
        with pytest.raises(openai.BadRequestError):
            other.create(model=MODEL, input="hi", previous_response_id=mine.id)
        assert server.openai("one").responses.retrieve(mine.id) == mine


def test_a_query_that_makes_no_sense_is_refused_by_name(server: Server) -> None:
    response_id = create(server, max_output_tokens=2).id
    for query, param in (
        ("?stream=maybe", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_none", "after"),
        ("/input_items?before=msg_none", "before"),
    ):
        answer = get(server, response_id + query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# --- going on --------------------------------------------------------------------------------


def test_a_stored_response_is_gone_on_from_over_http_and_the_socket(server: Server) -> None:
    first = create(server, input="one", instructions="be kind", max_output_tokens=6)
    second = create(server, input="two", previous_response_id=first.id, max_output_tokens=6)
    messages = [
        {"role": "user", "content": "one"},  # instructions are not carried over
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
    ]
    expected = server.text(server.answer(server.chat_prompt(*messages), 6))
    assert second.output_text == expected

    async def run() -> Response:
        async with connected(server) as socket:
            await socket.create("two", previous_response_id=first.id, max_output_tokens=6)
            return await socket.finish()

    third = asyncio.run(run())
    assert third.output_text == expected
    assert Response.model_validate_json(get(server, third.id).content, strict=True) == third
    with pytest.raises(openai.BadRequestError) as unknown:
        server.openai().responses.create(model=MODEL, input="x", previous_response_id="resp_0")
    assert unknown.value.code == "previous_response_not_found"


def test_an_item_can_be_sent_by_its_id(server: Server) -> None:
    first = create(server, input="one", max_output_tokens=6)
    reference = {"type": "item_reference", "id": first.output[0].id}
    again = {"role": "user", "content": "two"}
    by_id = create(server, input=[{"id": first.output[0].id}, again], max_output_tokens=4)
    assert (
        by_id.output_text
        == create(server, input=[reference, again], max_output_tokens=4).output_text
    )
    text = {"role": "assistant", "content": first.output_text}
    prompt = server.chat_prompt(text, again)
    assert by_id.output_text == server.text(server.answer(prompt, 4))
    with server.client() as client:
        body = {"input": [again, {"type": "item_reference", "id": "msg_none_0"}]}
        answer = client.post("/v1/responses", json=body)
    assert error_of(answer) == (400, "item_not_found", "input[1].id")


def test_input_items_are_all_that_a_response_was_made_from(server: Server) -> None:
    items = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"role": "assistant", "content": "two"},
    ]
    first = create(server, input=items, max_output_tokens=3)
    last = create(server, input="three", previous_response_id=first.id, max_output_tokens=3)
    with server.client() as client:
        path = f"/v1/responses/{last.id}/input_items?order=asc&limit=100"
        page = client.get(path).json()
    listed = [ITEM.validate_json(json.dumps(item), strict=True) for item in page["data"]]
    kinds = [item.type for item in listed]
    own = ["message", "message", "function_call", "function_call_output", "reasoning", "message"]
    assert kinds == [*own, "message", "message"]
    assert listed[6] == first.output[0] and listed[4].id == "rs_1"
    assert listed[-1].content[0].text == "three" and listed[0].role == "developer"
    assert (page["first_id"], page["last_id"]) == (listed[0].id, listed[-1].id)
    assert page["has_more"] is False and len({item.id for item in listed}) == len(listed)

    pages = server.openai().responses.input_items
    newest_first = [item.id for item in pages.list(last.id, limit=3)]
    assert newest_first == [item.id for item in reversed(listed)]
    after = pages.list(last.id, order="asc", limit=2, after=listed[1].id).data
    assert [item.id for item in after] == [item.id for item in listed[2:4]]
    before = get(server, f"{last.id}/input_items?order=asc&before={listed[2].id}").json()
    assert [item["id"] for item in before["data"]] == [item.id for item in listed[:2]]


def test_input_tokens_are_those_that_a_response_would_read(server: Server) -> None:
    client = server.openai()
    first = create(server, input="one", max_output_tokens=3)
    body: dict[str, Any] = {"input": "two", "previous_response_id": first.id}
    body["instructions"] = "be kind"
    counted = client.responses.input_tokens.count(model=MODEL, **body)
    assert counted.object == "response.input_tokens"
    response = client.responses.create(model=MODEL, max_output_tokens=1, **body)
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(model=MODEL, input="x", personality="friendly")
    assert refused.value.param == "personality"


# --- in the background -----------------------------------------------------------------------


def test_a_response_in_the_background_is_answered_at_once_and_polled_until_it_ends() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:
        client = server.openai()
        created = client.responses.create(
            model=MODEL, input="one", background=True, max_output_tokens=8, temperature=0
        )
        assert (created.status, created.background, created.output) == ("queued", True, [])
        assert client.responses.retrieve(created.id).status == "queued"
        gate.release(3)
        server.wait_until(lambda: server.engine.stats().generation_tokens_total > 0)
        assert client.responses.retrieve(created.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError) as running:
            client.responses.create(model=MODEL, input="x", previous_response_id=created.id)
        assert running.value.code == "previous_response_not_found"
        gate.release(1000)
        server.wait_idle()
        ended = client.responses.retrieve(created.id)
    assert (ended.status, ended.output_text) == ("incomplete", answer_text(server, "one"))


def test_a_stream_in_the_background_outlives_its_reader_and_is_read_on() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate)) as server:
        client = server.openai()
        body: dict[str, Any] = {"model": MODEL, "input": "one", "temperature": 0}
        reader = client.responses.create(
            **body,
            background=True,
            stream=True,
            max_output_tokens=30,
            extra_body={"min_tokens": 30},
        )
        first = []
        for event in reader:
            first.append(event)
            if event.type == "response.output_text.delta":
                break
        reader.close()
        names = [event.type for event in first[:3]]
        assert names == ["response.created", "response.queued", "response.in_progress"]
        assert first[0].response.status == first[1].response.status == "queued"
        gate.release(1000)
        server.wait_idle()
        response_id = first[0].response.id
        after = first[-1].sequence_number
        assert server.serving.app.state.answers.num_resumed == 0
        answer = get(server, f"{response_id}?stream=true&starting_after={after}")
        assert server.serving.app.state.answers.num_resumed == 1
        rest = sse_events(answer.text)
        final = rest[-1].response
        events = [*first, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert text_of(events) == final.output_text
        prompt = server.chat_prompt({"role": "user", "content": "one"})
        assert final.output_text == server.text(server.answer(prompt, 30, min_tokens=30))


@pytest.mark.parametrize("background", [True, False])
def test_a_running_response_is_cancelled_by_its_id_as_often_as_one_likes(
    background: bool,
) -> None:
    gate = threading.Semaphore(6)
    with serve(fake_runner(gate=gate)) as server:
        client = server.openai()
        events = iter(
            client.responses.create(
                model=MODEL,
                input="one",
                stream=True,
                background=background,
                max_output_tokens=200,
                extra_body={"ignore_eos": True},
            )
        )
        created = next(event for event in events if event.type == "response.created")
        assert next(event for event in events if event.type.endswith("text.delta"))
        cancelled = client.responses.cancel(created.response.id)
        assert (cancelled.status, cancelled.id) == ("cancelled", created.response.id)
        assert cancelled.output_text
        last = list(events)[-1]
        assert last.type == "response.incomplete" and last.response == cancelled
        assert client.responses.cancel(cancelled.id) == cancelled
        assert client.responses.retrieve(cancelled.id) == cancelled
        gate.release(1000)
        server.wait_idle()
        assert server.engine.stats().request_success_total["abort"] == 1


def test_deleting_a_running_response_ends_it() -> None:
    gate = threading.Semaphore(0)
    with serve(fake_runner(gate=gate)) as server:
        client = server.openai()
        created = client.responses.create(model=MODEL, input="one", background=True)
        with server.client() as http:
            deleted = http.delete(f"/v1/responses/{created.id}").json()
        assert deleted == {"id": created.id, "object": "response", "deleted": True}
        gate.release(1000)
        server.wait_idle()
        assert server.engine.stats().request_success_total["abort"] == 1
        assert get(server, created.id).status_code == 404


@pytest.mark.parametrize("runs", [True, False])
def test_a_response_that_was_deleted_is_nowhere_to_be_read(runs: bool) -> None:
    gate = threading.Semaphore(0 if runs else 1000)
    with serve(fake_runner(gate=gate)) as server, server.client() as http:
        client = server.openai()
        created = client.responses.create(model=MODEL, input="one", background=True)
        if not runs:
            server.wait_idle()
        assert http.head(f"/v1/streams/{created.id}").status_code == 200
        assert http.delete(f"/v1/responses/{created.id}").status_code == 200
        name = created.id.removeprefix("resp_")
        for url in (
            f"/v1/{where}/{x}" for where in ("streams", "requests") for x in (created.id, name)
        ):
            assert http.get(url).status_code == 404
        assert get(server, f"{created.id}?stream=true").status_code == 404
        gate.release(1000)
        server.wait_until(lambda: server.serving.app.state.answers.budget.num_bytes == 0)


def test_what_fails_in_the_background_is_told_by_its_status() -> None:
    gate = threading.Semaphore(0)
    runner = fake_runner(gate=gate)
    with serve(runner) as server:
        client = server.openai()
        runner.fail_next = "broken"
        created = client.responses.create(model=MODEL, input="one", background=True)
        gate.release(1000)
        server.wait_until(lambda: server.engine.stats().request_success_total["error"] == 1)
        server.wait_idle()
        failed = client.responses.retrieve(created.id)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.code == "server_error"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("store", {"background": True, "store": False}),
        ("background_options", {"background_options": {"completion_window": "soonest"}}),
        (
            "background_options.completion_window",
            {"background": True, "background_options": {"completion_window": "8h"}},
        ),
        ("on_disconnect", {"background": True, "on_disconnect": "abort"}),
        ("on_disconnect", {"background": True, "on_disconnect": "pause"}),
        (
            "stream_options.resumable",
            {"background": True, "stream": True, "stream_options": {"resumable": False}},
        ),
    ],
)
def test_what_makes_no_sense_in_the_background_is_refused(
    server: Server, param: str, body: dict[str, Any]
) -> None:
    with server.client() as client:
        answer = client.post("/v1/responses", json={"input": "hi"} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with serve(response_store_mib=0) as other, other.client() as client:
        answer = client.post("/v1/responses", json={"input": "hi", "background": True})
        assert answer.json()["error"]["param"] == "background"


# --- only preparing --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_prompt_can_be_prepared_without_an_answer(how: dict[str, Any]) -> None:
    text = "a long text that is to be read once, and asked about several times " * 2
    with serve() as server:
        warm = create(server, input=text, **how)
        assert (warm.status, warm.output) == ("completed", [])
        assert warm.usage is not None and warm.usage.output_tokens == 0
        response = create(server, input="why?", previous_response_id=warm.id, max_output_tokens=4)
        messages = [{"role": "user", "content": text}, {"role": "user", "content": "why?"}]
        prompt = server.chat_prompt(*messages)
        assert response.output_text == server.text(server.answer(prompt, 4))
        assert response.usage is not None
        cached = response.usage.input_tokens_details.cached_tokens
        assert cached >= warm.usage.input_tokens - 16

        async def run() -> list[Any]:
            async with connected(server) as socket:
                await socket.create(None, instructions="be kind", store=False, **how)
                warm = await socket.finish()
                await socket.create("one", previous_response_id=warm.id)
                assert (await socket.finish()).output_text == answer_text(server, "one")
                return [event.type for event in socket.events]

        types = asyncio.run(run())
        assert types[:3] == ["response.created", "response.in_progress", "response.completed"]


# --- what is kept ----------------------------------------------------------------------------


def record(store: ResponseStore, number: int, text: str = "x", owner: bytes = b"") -> Record:
    response = ResponseBody(id=f"resp_{number}", created_at=0, model=MODEL, temperature=1, top_p=1)
    turn = Turn(response.id, [InputItem(role="user", content=text)], None)
    made = Record(owner, turn, ResponseWriter(response), store)
    store.begin(made)
    return made


def end(made: Record) -> None:
    made.end(made.response)


async def kept(store: ResponseStore, *numbers: int) -> list[int]:
    return [number for number in numbers if store.get(b"", f"resp_{number}") is not None]


def test_the_oldest_that_have_ended_go_when_there_is_too_much() -> None:
    async def run() -> None:
        store = ResponseStore(20_000)
        running = record(store, 0, "x" * 30_000)
        for number in (1, 2, 3, 4):
            end(record(store, number, "x" * 4000))
        assert await kept(store, 0, 1, 2, 3, 4) == [0, 3, 4], "what runs stays"
        end(running)
        assert await kept(store, 0, 3, 4) == [], "a response that is too large for all goes too"
        turns = record(store, 5, "x" * 9000)
        end(turns)
        more = Record(
            b"",
            Turn("resp_6", [InputItem(role="user", content="y" * 9000)], turns.turn),
            ResponseWriter(
                ResponseBody(id="resp_6", created_at=0, model="", temperature=1, top_p=1)
            ),
            store,
        )
        store.begin(more)
        end(more)
        assert await kept(store, 5, 6) == [], "what turns share is counted for each of them"

    asyncio.run(run())


def test_what_is_too_large_for_the_store_is_refused_or_told_not_to_be_kept() -> None:
    body = {"input": "x" * 3000, "max_output_tokens": 1}
    runner = fake_runner(max_model_len=4000)
    with serve(runner, response_store_mib=4000 / 2**20) as server, server.client() as client:
        for field in ("background", "store"):
            answer = client.post("/v1/responses", json=body | {field: True})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        answer = client.post("/v1/responses", json=body)
        assert answer.status_code == 200 and answer.json()["store"] is False
        assert client.post("/v1/responses", json={"input": "x"}).json()["store"] is True


def test_what_a_response_tells_of_its_tools_takes_no_more_memory_than_is_counted(
    server: Server,
) -> None:
    """Of many small values there would be an object each."""
    schema = {"type": "object", "x-many": [[] for _ in range(20_000)]}
    tool = {"type": "function", "name": "f", "parameters": schema}
    made = create(server, tools=[tool], tool_choice="none", max_output_tokens=1)
    assert made.tools[0].parameters == schema  # type: ignore[union-attr]
    record = server.serving.app.state.responses._ended[b"", made.id]
    assert record.num_bytes > len(json.dumps(tool, separators=(",", ":")))
    found, todo = set(), [record]
    while todo:
        one = todo.pop()
        if id(one) not in found and not isinstance(one, (type, ResponseStore)):
            found.add(id(one))
            todo += gc.get_referents(one)
    assert len(found) < 1000


def test_what_has_ended_is_kept_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        store = ResponseStore(1 << 20, ttl_s=10.0)
        end(record(store, 1))
        now_s = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now_s + 9.0)
        assert await kept(store, 1) == [1]
        monkeypatch.setattr(loop, "time", lambda: now_s + 10.5)
        assert await kept(store, 1) == []

    asyncio.run(run())


def test_an_id_that_runs_is_taken_and_may_be_used_again_afterwards(server: Server) -> None:
    first = create(server, input="one", request_id="mine", max_output_tokens=2)
    again = create(server, input="two", request_id="mine", max_output_tokens=2)
    assert first.id == again.id == "resp_mine"
    assert Response.model_validate_json(get(server, "resp_mine").content) == again
