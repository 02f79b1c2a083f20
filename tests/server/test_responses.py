"""POST /v1/responses with the official client: JSON and server-sent events."""

from __future__ import annotations

import json
import threading
from itertools import groupby
from typing import Any

import openai
import pytest
from fakes import fake_logprobs
from server.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Server, fake_runner, serve
from server.responses_client import ORDER, create, sse_events, stream

from streamkv.engine.outputs import TokenDelta
from streamkv.protocol import FinishReason
from streamkv.server.responses.object import Response as ResponseBody
from streamkv.server.responses.writer import ResponseWriter

USER = {"role": "user", "content": "the quick brown fox"}


def test_the_json_answer_is_the_models_text_in_openais_shape(server: Server) -> None:
    prompt = server.chat_prompt(USER)
    response = create(server, max_output_tokens=9, min_tokens=9, metadata={"job": "7"})
    assert response.output_text == server.text(server.answer(prompt, 9, min_tokens=9))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), 9)
    assert response.usage.total_tokens == len(prompt) + 9
    assert (response.model, response.metadata) == (MODEL, {"job": "7"})
    assert response.output[0].id.startswith("msg_") and response.id.startswith("resp_")


def test_a_response_that_stops_by_itself_is_completed(server: Server) -> None:
    whole = create(server, max_output_tokens=20, ignore_eos=True).output_text
    stop = whole[5:7]
    response = create(server, max_output_tokens=20, ignore_eos=True, stop=stop)
    assert response.output_text == whole[: whole.index(stop)]
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.completed_at is not None and response.completed_at >= response.created_at


def test_streamed_events_come_in_order_and_tell_what_the_json_answer_tells(server: Server) -> None:
    events = stream(server, max_output_tokens=30)
    assert [name for name, _ in groupby(event.type for event in events)] == [
        *ORDER,
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == create(server, max_output_tokens=30).output_text
    done = {event.type: event for event in events}
    assert done["response.output_text.done"].text == text
    assert done["response.content_part.done"].part.text == text
    assert done["response.output_item.done"].item == final.output[0]
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


def test_the_official_client_streams_collects_and_waits_for_the_same_text(server: Server) -> None:
    text = server.text(server.answer(server.chat_prompt(USER), 12, min_tokens=12))
    body: dict[str, Any] = {"model": MODEL, "input": USER["content"], "temperature": 0}
    body |= {"max_output_tokens": 12, "extra_body": {"min_tokens": 12}}
    client = server.openai()
    with client.responses.create(**body, stream=True) as stream:
        streamed = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    with client.responses.stream(**body) as helper:
        snapshots = [e.snapshot for e in helper if e.type == "response.output_text.delta"]
    response = client.responses.create(**body)
    assert streamed == snapshots[-1] == response.output_text == text


def test_the_helpers_final_response_is_the_completed_one(server: Server) -> None:
    whole = create(server, max_output_tokens=20, ignore_eos=True).output_text
    client = server.openai()
    with client.responses.stream(
        model=MODEL,
        input=USER["content"],
        temperature=0,
        extra_body={"stop": [whole[4:6]], "ignore_eos": True},
    ) as stream:
        response = stream.get_final_response()
    assert response.output_text == whole[: whole.index(whole[4:6])]
    assert response.status == "completed"


def test_instructions_and_items_become_the_conversation_the_model_reads(server: Server) -> None:
    items = [
        {"role": "developer", "content": "be short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"role": "user", "content": "three"},
    ]
    response = create(server, instructions="be kind", input=items, max_output_tokens=8)
    prompt = server.chat_prompt(
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    )
    assert response.output_text == server.text(server.answer(prompt, 8))
    assert response.instructions == "be kind"


def test_cached_prompt_tokens_are_counted(server: Server) -> None:
    text = "a prompt that no other test sends, long enough to fill some blocks of the cache"
    first = create(server, input=text, max_output_tokens=1).usage
    again = create(server, input=text, max_output_tokens=1).usage
    assert first is not None and again is not None
    assert again.input_tokens_details.cached_tokens > 0
    assert again.input_tokens_details.cached_tokens < again.input_tokens == first.input_tokens


@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}]
)
def test_logprobs_come_with_every_token(server: Server, asked: dict[str, Any]) -> None:
    token_ids = server.answer(server.chat_prompt(USER), 6, min_tokens=6)
    response = create(server, max_output_tokens=6, min_tokens=6, **asked)
    part = response.output[0].content[0]  # type: ignore[union-attr]
    logprobs = part.logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert [bytes(entry.bytes) for entry in logprobs] == [
        server.tokenizer.token_bytes(token_id) for token_id in token_ids
    ]
    assert [entry.logprob for entry in logprobs] == [
        fake_logprobs(token_id, 2, VOCAB_SIZE).logprob for token_id in token_ids
    ]
    assert {len(entry.top_logprobs) for entry in logprobs} == {2}


def test_the_sampled_tokens_logprob_alone_can_be_asked_for(server: Server) -> None:
    response = create(server, max_output_tokens=3, include=["message.output_text.logprobs"])
    logprobs = response.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs and all(entry.top_logprobs == [] for entry in logprobs)


def test_errors_before_the_first_byte_have_a_status_also_when_streaming(server: Server) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="other", input="hi", stream=True)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(model=MODEL, input="fox " * MAX_MODEL_LEN, stream=True)
    with pytest.raises(openai.BadRequestError) as not_kept:
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_9")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    assert not_kept.value.code == "previous_response_not_found"


def test_a_failure_on_the_device_is_an_error_status_or_the_last_event() -> None:
    runner = fake_runner()
    body = {"model": MODEL, "input": "hi", "temperature": 0, "max_output_tokens": 40}
    with serve(runner) as server, server.client() as client:
        runner.fail_next = "broken"
        assert client.post("/v1/responses", json=body).status_code == 500
        runner.fail_next = "broken"
        events = sse_events(client.post("/v1/responses", json=body | {"stream": True}).text)
        assert create(server, max_output_tokens=4).output_text
    assert [event.type for event in events][-1:] == ["response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_leaving_a_stream_early_gives_its_blocks_back_within_two_steps() -> None:
    gate = threading.Semaphore(4)
    with serve(fake_runner(gate=gate)) as server:
        client = server.openai()
        stream = client.responses.create(model=MODEL, input="hi", stream=True, temperature=0)
        assert next(event for event in stream if event.type.endswith("delta"))
        stream.close()
        server.wait_until(lambda: server.engine.stats().request_success_total["abort"] == 1)
        gate.release(2)
        server.wait_idle()
        gate.release(1000)


def test_text_that_comes_together_with_the_cancellation_is_told() -> None:
    response = ResponseBody(id="resp_1", created_at=0, model=MODEL, temperature=1, top_p=1)
    writer = ResponseWriter(response)
    events = writer.push(0, TokenDelta(0, "late", (5,), finish_reason=FinishReason.ABORT))
    assert [event.name for event in events] == [*ORDER[2:], "response.incomplete"]
    assert (writer.response.output_text, writer.response.status) == ("late", "cancelled")


def test_the_event_lines_are_json_on_one_line_each(server: Server) -> None:
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 3, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = list(answer.iter_lines())
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert len(data) * 4 == len(lines), "an id, a name, data and an empty line"
    assert all("stream_id" not in event for event in data)
