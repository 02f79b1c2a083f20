"""Tool calls and reasoning through chat completions: what a model wrote, as clients read it.

The model says a script; its chat template says in which format it calls tools.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pydantic
import pytest
from openai import LengthFinishReasonError, pydantic_function_tool
from server.harness import MODEL, ScriptedRunner, Server, read_events, serve
from tiny import tiny_gguf_metadata, tiny_tokenizer

from streamkv.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "weather?"}
END = 2

_TURNS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} \
{{ c.function.arguments | tojson }} {{ c.id }}]{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{{ begin or '' }}{% endif %}"""
_THINKING = _TURNS.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif %}" + _TURNS,
    "llama3_json": '{% if tools %}{"name": , "parameters": }{{ tools | tojson }}{% endif %}'
    + _TURNS,
    "pythonic": "{% if tools %}[func_name1(a=1)]{{ tools | tojson }}{% endif %}" + _TURNS,
    "mistral": "{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}" + _TURNS,
    "reasoning": _THINKING,
    "both": "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif %}" + _THINKING,
    "other": "{% if tools %}{{ tools | tojson }}<tool_call><function=f></tool_call>{% endif %}"
    + _TURNS,
}

OSLO = {"city": "Oslo 🙂", "days": [1, 2.5], "deep": {"a": None, "b": '"}]\\ <tool_call>'}}
ROME = {"city": "Rome"}


def as_json(key: str, arguments: dict[str, Any]) -> str:
    """A call as most formats write it."""
    return f'{{"name": "weather", "{key}": {json.dumps(arguments)}}}'


_ARGUMENTS, _PARAMETERS = "arguments", "parameters"
CALLS = {
    "hermes": [
        f"<tool_call>\n{as_json(_ARGUMENTS, OSLO)}\n</tool_call>",
        f"\n<tool_call>\n{as_json(_ARGUMENTS, ROME)}\n</tool_call>",
    ],
    "llama3_json": [as_json(_PARAMETERS, OSLO), f"; {as_json(_PARAMETERS, ROME)}"],
    "pythonic": [
        f"[weather(city={OSLO['city']!r}, days=[1, 2.5], deep={OSLO['deep']!r})",
        ", weather(city='Rome')]",
    ],
    "mistral": [
        f"[TOOL_CALLS][{as_json(_ARGUMENTS, OSLO)}",
        f", {as_json(_ARGUMENTS, ROME)}]",
    ],
}


class Weather(pydantic.BaseModel):
    """The weather somewhere."""

    city: str


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def model(kind: str) -> Tokenizer:
    return tiny_tokenizer(**{"tokenizer.chat_template": TEMPLATES[kind]})


@contextmanager
def saying(text: str, kind: str) -> Iterator[Server]:
    """A server whose model of that kind says the text, and ends."""
    tokenizer = model(kind)
    script = [*tokenizer.encode(text), END]
    with serve(ScriptedRunner(script), engine={"tokenizer": tokenizer}) as server:
        yield server


def ask(server: Server, *, stream: bool, **fields: Any) -> Any:
    """The one choice of the answer, as a dict; of a stream what its chunks make together."""
    body = {"messages": [USER], "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    with server.client() as client:
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        whole = answer.json()
        return whole["choices"][0] | {"usage": whole["usage"]}
    *chunks, last, done = read_events(answer.text)
    assert done == "[DONE]" and last["choices"] == []
    return joined([chunk["choices"][0] for chunk in chunks]) | {"usage": last["usage"]}


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that these chunks of it make."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    logprobs: list[Any] = []
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({"id": part["id"], "type": "function", "function": part["function"]})
            else:
                assert part["index"] == len(calls) - 1, "calls come one after the other"
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                before = calls[-1]["function"]
                more = part["function"]["arguments"]
                calls[-1]["function"] = before | {"arguments": before["arguments"] + more}
        logprobs += (choice["logprobs"] or {"content": []})["content"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    last = choices[-1]
    return {
        "index": last["index"],
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
        "finish_reason": last["finish_reason"],
        "stop_reason": last["stop_reason"],
    }


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", ())
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids) and all(ids)
    functions = [call["function"] for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_calls_are_read_in_the_models_format(kind: str, stream: bool) -> None:
    with saying("".join(CALLS[kind]), kind) as server:
        choice = ask(server, stream=stream, tools=[tool()])
        assert called(choice) == [("weather", OSLO), ("weather", ROME)]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        one = ask(server, stream=stream, tools=[tool()], parallel_tool_calls=False)
        assert called(one) == [("weather", OSLO)]
        assert one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_what_isnt_a_call_is_content_and_ends_by_stop(stream: bool) -> None:
    with saying("I'd say <tool_call> is a mark.", "hermes") as server:
        choice = ask(server, stream=stream, tools=[tool()])
    assert choice["message"] == {
        "role": "assistant",
        "content": "I'd say <tool_call> is a mark.",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_words_before_a_call_are_content_and_a_cut_call_ends_by_length(stream: bool) -> None:
    text = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Os'
    with saying(text, "hermes") as server:
        num_tokens = len(model("hermes").encode(text))
        choice = ask(server, stream=stream, tools=[tool()], max_tokens=num_tokens)
    assert choice["message"]["content"].strip() == "Let me look."
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Os'}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_marks_that_are_special_tokens_are_seen_and_other_texts_stay_clean(stream: bool) -> None:
    tokens = ["[TOOL_CALLS]", *tiny_gguf_metadata()["tokenizer.ggml.tokens"][1:]]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": TEMPLATES["mistral"]}
    tokenizer = tiny_tokenizer(**changes)
    assert 0 in tokenizer.special_token_ids
    script = [*tokenizer.encode("Well. " + "".join(CALLS["mistral"])), END]
    assert script.count(0) == 1
    with serve(ScriptedRunner(script), engine={"tokenizer": tokenizer}) as server:
        choice = ask(server, stream=stream, tools=[tool()])
        plain = ask(server, stream=stream)
    assert called(choice) == [("weather", OSLO), ("weather", ROME)]
    assert choice["message"]["content"].strip() == "Well."
    assert plain["message"]["content"] == "Well. " + "".join(CALLS["mistral"])[len(tokens[0]) :]


def test_arguments_stream_as_they_are_written() -> None:
    city = "Oslo and all that is around it, as far as the eye can see on a clear day"
    text = CALLS["hermes"][0].replace("Oslo", city)
    with saying(text, "hermes") as server, server.client() as client:
        body = {"messages": [USER], "tools": [tool()], "stream": True}
        events = read_events(client.post(CHAT, json=body).text)
    parts = [
        call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(parts) > 20
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert max(len(part["function"]["arguments"]) for part in parts) < len(city)


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_has_its_log_probability_as_it_was_sampled(stream: bool) -> None:
    text = "<think>\nhm\n</think>\n\nWell. " + CALLS["hermes"][0]
    with saying(text, "both") as server:
        choice = ask(server, stream=stream, tools=[tool()], logprobs=True)
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert called(choice) == [("weather", OSLO)]
    assert choice["usage"]["completion_tokens"] == len(entries)


# --- what the model is told -------------------------------------------------------------------


def prompt_of(server: Server, **fields: Any) -> str:
    body = {"messages": [USER], "max_tokens": 1, "return_token_ids": True, **fields}
    with server.client() as client:
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return server.tokenizer.decode(answer.json()["prompt_token_ids"], skip_special_tokens=False)


def test_tools_calls_and_results_reach_the_template() -> None:
    call = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    tools = [tool(description="of a city", strict=True)]
    with saying("ok", "both") as server, server.client() as client:
        prompt = prompt_of(server, messages=messages, tools=tools)
        body = {"messages": messages, "tools": tools}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert prompt.startswith(json.dumps(tools) + " in <tool_call></tool_call><|im_start|>user")
    assert '<think>\nhm\n</think>\n\n[weather {"city": "Oslo"} call_1]<|im_end|>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt
    assert server.tokenizer.decode(tokens, skip_special_tokens=False) == prompt


def test_a_conversation_goes_on_after_a_call_that_was_cut() -> None:
    with saying("ok", "hermes") as server:
        prompts = [
            prompt_of(server, messages=[USER, {"role": "assistant", **called}, USER])
            for arguments in ('{"city": "Os', "[1]", "{}")
            for function in [{"name": "weather", "arguments": arguments}]
            for called in (
                {"tool_calls": [{"type": "function", "function": function}]},
                {"function_call": function},
            )
        ]
    assert "[weather {} ]<|im_end|>" in prompts[-1]
    assert set(prompts) == {prompts[-1]}


def test_with_none_the_model_is_told_of_no_tools_and_calls_are_text() -> None:
    text = CALLS["hermes"][0]
    with saying(text, "hermes") as server:
        assert "weather" not in prompt_of(server, tools=[tool()], tool_choice="none")[:-60]
        choice = ask(server, stream=False, tools=[tool()], tool_choice="none")
        assert choice["message"]["content"] == text
        assert prompt_of(server, tools=[]) == prompt_of(server)


def test_of_allowed_tools_only_these_are_told() -> None:
    tools = [tool("weather"), tool("mail"), tool("pay")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "mail"}}]}
    with saying("ok", "hermes") as server:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        prompt = prompt_of(server, tools=tools, tool_choice=choice)
    assert '"mail"' in prompt
    assert '"pay"' not in prompt and '"weather"' not in prompt


def test_a_template_with_tools_in_a_format_that_isnt_read_is_a_400() -> None:
    with saying("ok", "other") as server, server.client() as client:
        for choice in ("auto", "required"):
            body = {"messages": [USER], "tools": [tool()], "tool_choice": choice}
            answer = client.post(CHAT, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
            assert "chat template" in answer.json()["error"]["message"]
        assert client.post(CHAT, json=body | {"tool_choice": "none"}).status_code == 200


# --- reasoning --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_both_names_and_its_tokens_are_counted(stream: bool) -> None:
    thought, answer = "Hm, 2 < 3 🙂.\n\nSo </b> it is.", "Yes."
    text = f"<think>\n{thought}\n</think>\n\n{answer}"
    with saying(text, "reasoning") as server:
        choice = ask(server, stream=stream)
        message = choice["message"]
        assert (message["reasoning"], message["reasoning_content"]) == (thought, thought)
        assert message["content"] == answer
        assert choice["finish_reason"] == "stop"
        num = len(server.tokenizer.encode(f"<think>\n{thought}\n</think>"))
        details = choice["usage"]["completion_tokens_details"]
        assert abs(details["reasoning_tokens"] - num) <= 1  # words may be cut otherwise at its end
        hidden = ask(server, stream=stream, include_reasoning=False)
        assert hidden["message"] == {"role": "assistant", "content": answer, "refusal": None}
        assert hidden["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_may_have_begun_the_reasoning(stream: bool) -> None:
    variables = {"chat_template_kwargs": {"begin": "<think>\n"}}
    with saying("so\n</think>\n\nYes.", "reasoning") as server:
        begun = ask(server, stream=stream, **variables)
        assert begun["message"]["reasoning"] == "so"
        assert begun["message"]["content"] == "Yes."
        assert begun["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
        plain = ask(server, stream=stream)
        assert plain["message"]["content"] == "so\n</think>\n\nYes."
        assert "reasoning" not in plain["message"]
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("asked", "so_far", "reasoning"),
    [
        ("What is <think> for?", "Well, ", None),
        ("hi", "The mark <think> means ", None),
        ("hi", "<think>\nHm</think>\n\nWell, ", None),
        ("hi", "<think>\nHm, ", "so"),
    ],
)
def test_only_the_message_that_is_continued_tells_whether_it_reasons(
    asked: str, so_far: str, reasoning: str | None
) -> None:
    messages = [USER | {"content": asked}, {"role": "assistant", "content": so_far}]
    with saying("so</think>Yes.", "reasoning") as server:
        found = ask(server, stream=False, messages=messages, continue_final_message=True)
    assert found["message"].get("reasoning") == reasoning
    assert found["message"]["content"] == ("so</think>Yes." if reasoning is None else "Yes.")


def test_a_call_in_openais_older_form_reaches_the_template() -> None:
    messages = [
        USER,
        {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "assistant", "refusal": "I won't."},
    ]
    with saying("ok", "both") as server:
        prompt = prompt_of(server, messages=messages)
    assert '<|im_start|>assistant\n[weather {"a": 1} ]<|im_end|>' in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt
    assert "<|im_start|>assistant\nI won't.<|im_end|>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_name_makes_it_no_call(stream: bool) -> None:
    text = '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>'
    with saying(text, "hermes") as server:
        found = ask(server, stream=stream, tools=[tool()])
    assert found["message"]["content"] == text
    assert "tool_calls" not in found["message"]


def test_a_model_that_doesnt_reason_has_no_count_of_it(server: Server) -> None:
    assert "completion_tokens_details" not in ask(server, stream=False, max_tokens=1)["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_calls_in_one_answer(stream: bool) -> None:
    text = "<think>\nLook it up.\n</think>\n\nA moment." + "".join(CALLS["hermes"])
    with saying(text, "both") as server:
        choice = ask(server, stream=stream, tools=[tool()])
    assert choice["message"]["reasoning"] == "Look it up."
    assert choice["message"]["content"] == "A moment."
    assert called(choice) == [("weather", OSLO), ("weather", ROME)]


# --- the official client ----------------------------------------------------------------------


def test_the_official_client_parses_calls_whole_and_streamed() -> None:
    text = CALLS["hermes"][1].strip().replace("weather", "Weather")
    with saying(text, "hermes") as server:
        completions = server.openai().chat.completions
        arguments: Any = {
            "model": MODEL,
            "messages": [USER],
            "tools": [pydantic_function_tool(Weather)],
        }
        whole = completions.parse(**arguments).choices[0].message
        with completions.stream(**arguments) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        [call] = message.tool_calls or ()
        assert call.function.name == "Weather"
        assert json.loads(call.function.arguments) == ROME
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert json.loads("".join(event.arguments_delta for event in deltas)) == ROME
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert json.loads(done.arguments) == ROME


def test_the_async_client_reads_choices_side_by_side() -> None:
    async def read(server: Server) -> list[str]:
        names = ["", ""]
        async with server.async_openai() as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[USER], tools=[tool()], n=2, stream=True
            )
            async for chunk in stream:
                for call in chunk.choices[0].delta.tool_calls or ():
                    names[chunk.choices[0].index] += call.function.name or ""
        return names

    with saying("".join(CALLS["mistral"]), "mistral") as server:
        assert asyncio.run(read(server)) == ["weather" * 2] * 2


def test_a_cut_answer_is_what_the_client_calls_so() -> None:
    with saying(CALLS["hermes"][0], "hermes") as server:
        with pytest.raises(LengthFinishReasonError):
            server.openai().chat.completions.parse(
                model=MODEL, messages=[USER], tools=[pydantic_function_tool(Weather)], max_tokens=9
            )
