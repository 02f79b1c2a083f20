"""Tools, calls and their results in prompts, as transformers renders them; several templates in a
checkpoint; a request's own template; models that were never taught tools."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny import CHATML, save_tiny_tokenizer, tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamkv.errors import InvalidRequestError, ModelLoadError
from streamkv.text import chat_template
from streamkv.text.chat_prompt import render_chat
from streamkv.text.chat_template import MAX_CLIENT_TEMPLATE_CHARS, ChatTemplate
from streamkv.text.tokenizer import Tokenizer

QWEN_STYLE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thoughts %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA_STYLE = """\
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|h|>ipython\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|h|>' + message.role + '\\n\\n' }}
        {%- if tools and loop.last %}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant\\n\\n' }}{%- endif %}
"""

MISTRAL_STYLE = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() %}
                    {{- '"' + key + '": ' + value | tojson }}{{- ', ' if not loop.last else '}}' }}
                {%- endfor %}
                {{- ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('ids of calls have 9 characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']</s>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city: <é> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ITERATING = """\
{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{%- for key, value in c.function.arguments.items() %}{{ key }}: {{ value }}{% endfor %}
{%- for key, value in c.function.arguments | items %}{{ key }}: {{ value }}{% endfor %}
{%- endfor %}{% endfor %}"""
ARGUMENTS = {"city": "Zürich", "days": [1, 2.5, None], "deep": {"<a>": True}}


def call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def chat(arguments: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "How is it there?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, arguments)]},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "abcdefgh1"},
        {"role": "assistant", "content": "Sunny. <think>hm</think>\n\nYes."},
        {"role": "user", "content": "And here?"},
    ]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))


@pytest.mark.parametrize("source", [QWEN_STYLE, LLAMA_STYLE, MISTRAL_STYLE])
@pytest.mark.parametrize("tools", [TOOLS, None])
def test_calls_and_results_render_as_in_transformers(
    theirs: PreTrainedTokenizerFast, source: str, tools: list[dict[str, Any]] | None
) -> None:
    expected = theirs.apply_chat_template(
        chat(ARGUMENTS), chat_template=source, tools=tools, tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": source})
    messages = chat(json.dumps(ARGUMENTS))
    messages[1]["content"] = None
    assert tokenizer.apply_chat_template(messages, tools=tools) == expected
    for message in messages:  # as the official client's objects have them
        for key in ("name", "refusal", "audio", "function_call", "tool_calls", "annotations"):
            message.setdefault(key, None)
    assert tokenizer.apply_chat_template(messages, tools=tools) == expected
    timed = tiny_tokenizer().apply_chat_template(messages, tools=tools, chat_template=source)
    assert timed == expected


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_what_was_reasoned_reaches_the_template_whatever_it_is_called(
    theirs: PreTrainedTokenizerFast, key: str
) -> None:
    messages = [*chat(ARGUMENTS)[:3], {"role": "assistant", "content": "Yes.", key: "\nhm\n"}]
    expected = theirs.apply_chat_template(messages, chat_template=QWEN_STYLE, tokenize=False)
    rendered = ChatTemplate(QWEN_STYLE).render(messages, add_generation_prompt=False)
    assert rendered == expected and "<think>\nhm\n</think>" in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].tool_calls[0].function.arguments }}",
        "{{ '' + messages[0].tool_calls[0].function.arguments }}",
        "{{ messages[0].tool_calls[0].function.arguments + '' }}",
        "{{ messages[0].tool_calls[0].function.arguments ~ '' }}",
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        "{{ messages[0].tool_calls[0].function.arguments | string }}",
    ],
)
def test_arguments_are_json_for_templates_that_take_them_for_text(source: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [call(1, json.dumps(ARGUMENTS))]}]
    rendered = ChatTemplate(source).render(messages)
    assert rendered == json.dumps(ARGUMENTS, ensure_ascii=False)


@pytest.mark.parametrize("source", [QWEN_STYLE, LLAMA_STYLE, MISTRAL_STYLE, ITERATING, CHATML])
@pytest.mark.parametrize("cut", ['{"city": "Zü', "[1]", "null"])
def test_a_call_whose_arguments_are_no_object_is_rendered_without(source: str, cut: str) -> None:
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": source})
    assert tokenizer.apply_chat_template(chat(cut)) == tokenizer.apply_chat_template(chat("{}"))


def test_documents_reach_the_template(theirs: PreTrainedTokenizerFast) -> None:
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }};{% endfor %}"
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    expected = theirs.apply_chat_template(
        chat(""), chat_template=source, documents=documents, tokenize=False
    )
    assert render_chat(tiny_tokenizer(), chat("{}"), chat_template=source, documents=documents) == (
        expected,
        None,
        "",
    )


# --- the last message goes on ---------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, QWEN_STYLE, LLAMA_STYLE])
@pytest.mark.parametrize(
    "content", ["it is the ", " it\n", "it", [{"type": "text", "text": "it "}]]
)
def test_the_last_message_is_continued_as_by_transformers(
    theirs: PreTrainedTokenizerFast, source: str, content: Any
) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "it is the "}]
    if isinstance(content, str):
        messages[1]["content"] = content
    else:
        messages[1]["content"] = content[0]["text"]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": source})
    messages[1]["content"] = content
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(messages, **options) == expected
    messages[0]["content"] = "?<|im_end|>"
    prompt = render_chat(tokenizer, messages, **options)
    assert prompt.text == expected.replace("?", "?<|im_end|>")


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (chat("{}"), {"add_generation_prompt": True}, "continue_final_message"),
        ([], {}, "messages"),
        (chat("{}"), {"chat_template": "nothing"}, "messages"),
    ],
)
def test_what_can_not_be_continued_is_refused(
    messages: list[dict[str, Any]], options: dict[str, Any], param: str
) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True, **options}
    with pytest.raises(InvalidRequestError) as caught:
        tiny_tokenizer().apply_chat_template(messages, **options)
    assert caught.value.param == param


# --- templates by name ----------------------------------------------------------------------------

NAMED = {
    "default": "plain {{ tools | length if tools else 0 }}",
    "tool_use": "tools <tool_call> {{ tools | length }}",
    "rag": "{{ documents[0].text }}",
}


def test_a_checkpoint_may_have_several_templates(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    config_file = tmp_path / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    listed = [{"name": name, "template": source} for name, source in NAMED.items()]
    config_file.write_text(json.dumps(config | {"chat_template": listed}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    metadata = {
        f"tokenizer.chat_template.{name}": source
        for name, source in NAMED.items()
        if name != "default"
    }
    metadata["tokenizer.chat_template"] = NAMED["default"]
    files = tmp_path / "files"
    (files / "additional_chat_templates").mkdir(parents=True)
    save_tiny_tokenizer(files)
    for name, source in NAMED.items():
        in_folder = files / "additional_chat_templates" / f"{name}.jinja"
        (files / "chat_template.jinja" if name == "default" else in_folder).write_text(source)
    for tokenizer in (
        Tokenizer.from_folder(tmp_path),
        Tokenizer.from_folder(files),
        tiny_tokenizer(**metadata),
    ):
        for options in (
            {},
            {"tools": TOOLS},
            {"tools": TOOLS, "chat_template": "default"},
            {"chat_template": "rag", "documents": [{"title": "", "text": "read"}]},
            {"chat_template": "mine {{ tools | length }}", "tools": TOOLS},
        ):
            expected = theirs.apply_chat_template(chat(ARGUMENTS), tokenize=False, **options)
            assert tokenizer.apply_chat_template(chat(ARGUMENTS), **options) == expected
        assert tokenizer.tool_format is not None and tokenizer.tool_format.name == "hermes"
        assert tokenizer.chat_template is not None
        assert tokenizer.chat_template.source == NAMED["default"]
    one = Tokenizer.from_folder(tmp_path, chat_template=CHATML)
    assert one.apply_chat_template(chat(ARGUMENTS)[:1], tools=None).startswith("<|im_start|>user")


@pytest.mark.parametrize("metadata", [{"tokenizer.chat_template.rag": "{% if %}"}])
def test_each_of_a_checkpoints_templates_must_be_jinja(metadata: dict[str, str]) -> None:
    with pytest.raises(ModelLoadError, match="valid Jinja"):
        tiny_tokenizer(**metadata)


# --- a request's own template ---------------------------------------------------------------------


def refusal(source: str, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        tiny_tokenizer().apply_chat_template(chat("{}"), chat_template=source, **options)
    return caught.value


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% if %}", "valid Jinja"),
        ("{{ f(a=1, a=2) }}", "can't be compiled"),
        ("x" * (MAX_CLIENT_TEMPLATE_CHARS + 1), f"at most {MAX_CLIENT_TEMPLATE_CHARS} characters"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' * 10 ** 9 }}", "too large"),
        ("{{ [0] * (2 * 10 ** 7) }}", "too large"),
        ("{{ 10 ** 10000 }}", "too large"),
        ("{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x*n.x %}{% endfor %}",
         "too large"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_requests_template_is_its_error(source: str, named: str) -> None:
    error = refusal(source)
    assert error.param == "chat_template"
    assert error.message.startswith("chat_template: ") and named in error.message
    assert "checkpoint" not in error.message and "--chat-template" not in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in m %}{% for b in m %}{% for c in m %}{% endfor %}{% endfor %}{% endfor %}",
    ],
)
def test_a_requests_template_is_stopped_when_it_takes_too_long(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CLIENT_SECONDS", 0.1)
    start = time.process_time()
    error = refusal(source, m="x" * 5000)
    assert "too long" in error.message
    assert time.process_time() - start < 1


def test_loops_know_their_length_in_a_requests_template_too() -> None:
    source = """{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}
{{- (loop.nextitem or m).role }}{% else %}none{% endfor %}
{%- for m in messages if m.role == 'user' %}{{ loop.revindex }}{% endfor %}
{%- for k, v in messages[0].items() %}{{ k }}{% endfor %}
{%- for x in [[1, [2]], [3]] recursive %}{{ x if x is not iterable else loop(x) }}{% endfor %}"""
    expected = ChatTemplate(source).render(chat("{}"))
    assert tiny_tokenizer().apply_chat_template(chat("{}"), chat_template=source) == expected


# --- models that were never taught tools ----------------------------------------------------------


def test_a_model_that_knows_no_tools_is_told_of_them_in_the_system_message() -> None:
    tokenizer = tiny_tokenizer()
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    for system in ([], [{"role": "developer", "content": "Be brief."}]):
        messages = [*system, {"role": "user", "content": "hi"}]
        told = tokenizer.apply_chat_template(messages, tools=TOOLS)
        assert told.endswith(plain) and told.count("<|im_start|>system\n") == 1
        assert json.dumps(TOOLS[0], ensure_ascii=False) in told
        assert '<tool_call>\n{"name":' in told
        assert ("<|im_start|>system\nBe brief.\n\n" in told) is bool(system)
    assert tokenizer.apply_chat_template(messages[1:], tools=[]) == plain


def test_calls_and_results_are_written_for_a_model_that_knows_none() -> None:
    results = [
        {"role": "tool", "content": text, "tool_call_id": "abcdefgh1"} for text in ("a", "b")
    ]
    both = [call(1, json.dumps(ARGUMENTS)), call(2, "{}")]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": both},
        *results,
        {"role": "user", "content": "so?"},
    ]
    written = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
    assert tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nLet me see.\n"
        f"<tool_call>\n{written}\n</tool_call>\n"
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n"
    )


def test_a_requests_own_template_is_rendered_as_it_is() -> None:
    rendered = tiny_tokenizer().apply_chat_template(
        [{"role": "tool", "content": "7"}], tools=TOOLS, chat_template=CHATML
    )
    assert rendered == "<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
