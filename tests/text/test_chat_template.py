"""Chat templates against transformers' apply_chat_template."""

from __future__ import annotations

import tracemalloc
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from tiny import CHATML
from transformers import PreTrainedTokenizerFast

from streamkv.errors import InvalidRequestError, ModelLoadError
from streamkv.text import chat_template
from streamkv.text.chat_template import ChatTemplate

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA3_STYLE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|/header|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_STYLE = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

BLOCKS_STYLE = """\
{% macro say(who, what) %}
<{{ who }}>
{{ what }}
</{{ who }}>
{% endmacro %}
    {# an indented comment #}
    {% for message in messages %}
        {% if message.role == "skip" %}{% continue %}{% endif %}
        {% if message.role == "stop" %}{% break %}{% endif %}
{{ say(message.role, message.content) }}
        {% generation %}
[{{ message.name | default("nobody") }}|{{ messages | length }}|{{ loop.index0 }}]
        {% endgeneration %}
    {% endfor %}
{{ {"text": "é <&> 日本", "n": [1, none, true]} | tojson }}
{{ tools is none }} {{ documents is none }} {{ eos_token is defined }} {{ unk_token is defined }}
{% if enable_thinking is defined and not enable_thinking %}<no-think/>{% endif %}
"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be <b>brief</b> & 'kind' "}, {"role": "user", "content": "?"}],
    [
        {"role": "user", "content": "日本 👋\n\n  indented\n"},
        {"role": "assistant", "content": "", "name": None},
        {"role": "user", "content": "{{ not_rendered }} {% raw %}"},
    ],
    [
        {"role": "skip", "content": "x"},
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "stop", "content": "y"},
        {"role": "user", "content": "b"},
    ],
]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)


@pytest.mark.parametrize("source", [CHATML, LLAMA3_STYLE, MISTRAL_STYLE, BLOCKS_STYLE])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize(
    "kwargs", [{}, {"add_generation_prompt": False, "enable_thinking": False, "date_string": "x"}]
)
def test_templates_render_as_in_transformers(
    transformers_tokenizer: PreTrainedTokenizerFast,
    source: str,
    messages: list[dict[str, Any]],
    kwargs: dict[str, Any],
) -> None:
    def rendered_by_transformers() -> str | None:
        options = {"add_generation_prompt": True} | kwargs
        try:
            return transformers_tokenizer.apply_chat_template(
                messages, chat_template=source, tokenize=False, **options
            )
        except Exception as error:
            assert "roles must alternate" in str(error)
            return None

    template = ChatTemplate(source, SPECIALS)
    expected = rendered_by_transformers()
    if expected is None:
        with pytest.raises(InvalidRequestError, match="roles must alternate"):
            template.render(messages, **kwargs)
    else:
        assert template.render(messages, **kwargs) == expected


def test_tools_reach_the_template(transformers_tokenizer: PreTrainedTokenizerFast) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é <x>"}}
    options: dict[str, Any] = {"tools": [tool], "date_string": "today"}
    expected = transformers_tokenizer.apply_chat_template(
        CHATS[0], chat_template=LLAMA3_STYLE, tokenize=False, **options
    )
    ours = ChatTemplate(LLAMA3_STYLE, SPECIALS)
    assert ours.render(CHATS[0], add_generation_prompt=False, **options) == expected
    assert '"description": "é <x>"' in expected


def test_the_date_is_todays() -> None:
    before = datetime.now()
    rendered = ChatTemplate('{{ strftime_now("%Y-%m-%d") }}').render([])
    assert rendered in (f"{before:%Y-%m-%d}", f"{datetime.now():%Y-%m-%d}")


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{% for m in messages %}{{ m.content + '|' }}{% endfor %}")
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "three"}]
    assert template.render(messages) == "one\ntwo|three|"
    assert messages[0]["content"] is parts


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", None]
)
def test_a_part_that_is_not_text_is_refused_by_its_place(part: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(InvalidRequestError, match="text only") as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[5].role + 'x' }}", "no element 5|has no element"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages | nope }}", "nope"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "(?i)range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'x' %}", "loader|include"),
    ],
)
def test_what_a_template_does_wrong_is_the_requests_error(source: str, named: str) -> None:
    with pytest.raises((InvalidRequestError, ModelLoadError), match=named) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.param == "messages"


def test_a_template_that_never_stops_writing_is_cut_off() -> None:
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ m }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequestError, match=str(chat_template.MAX_RENDERED_CHARS)):
        ChatTemplate(endless).render([], m="x" * 100_000)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ f(a=1, a=2) }}"]
)
def test_a_template_that_can_not_be_compiled_is_a_load_error(source: str) -> None:
    with pytest.raises(ModelLoadError, match="can't be compiled") as caught:
        ChatTemplate(source)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 8 }}",
        "{{ 'a' | center(10 ** 8) }}",
        "{% if 'a' * 10 ** 8 %}{% endif %}",
        "{% set x = 'a' * 10 ** 8 %}",
    ],
)
def test_compiling_a_template_computes_nothing_of_it(source: str) -> None:
    tracemalloc.start()
    try:
        ChatTemplate(source)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_a_template_that_is_no_jinja_is_a_load_error_with_its_line() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("fine\n{% if %}")
