"""The chat page in a real Chromium, against a server that says exactly what the test wants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from web.scripted_server import MODEL, OpenPage, ScriptedServer, Step

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def page(server: ScriptedServer, open_page: OpenPage) -> Page:
    """The page, connected."""
    page = open_page(server.url)
    expect(page.locator("#link-text")).to_have_text(MODEL)
    return page


def send(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answers(page: Page, status: str = "done") -> Locator:
    return page.locator(f".assistant[data-status={status}]")


# --- a conversation ------------------------------------------------------------------------------


def test_a_typed_message_streams_an_answer_and_its_figures(
    server: ScriptedServer, page: Page
) -> None:
    server.script = ["Hel", "lo", Step.HOLD, " there."]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Hello")
    expect(answers(page, "streaming")).to_have_attribute("aria-busy", "true")
    server.release()
    expect(answers(page).locator(".body")).to_have_text("Hello there.")
    figures = r"3 tokens\s*\d+\.\d tok/s\s*[\d.]+ m?s to first token\s*80 % cached"
    expect(answers(page).locator(".stats")).to_have_text(re.compile(figures))
    expect(answers(page)).to_have_attribute("aria-busy", "false")
    expect(page.get_by_label("Message")).to_have_value("")


def test_each_request_carries_the_whole_conversation(server: ScriptedServer, page: Page) -> None:
    send(page, "One")
    expect(answers(page)).to_have_count(1)
    send(page, "Two")
    expect(answers(page)).to_have_count(2)
    first, second = (server.next_event("response.create") for _ in range(2))
    turns = [(item["role"], item["content"]) for item in second["input"]]
    assert turns == [("user", "One"), ("assistant", "Hello."), ("user", "Two")]
    assert first["model"] == MODEL
    assert first["stream_id"] != second["stream_id"]
    defaults = {"temperature": 0.7, "top_p": 0.95, "max_output_tokens": 1024}
    assert {name: first.get(name) for name in defaults} == defaults
    assert not {"instructions", "top_k", "seed"} & first.keys()


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_cancels_the_response_and_keeps_its_text(
    server: ScriptedServer, page: Page, how: str
) -> None:
    server.script = ["Some text", Step.HOLD]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Some text")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answers(page, "stopped").locator(".body")).to_have_text("Some text")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    created = server.next_event("response.create")
    assert server.next_event("response.cancel")["stream_id"] == created["stream_id"]


def test_regenerate_asks_again_without_the_last_answer(server: ScriptedServer, page: Page) -> None:
    send(page, "Hi")
    expect(answers(page)).to_have_count(1)
    server.script = ["Another."]
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).locator(".body")).to_have_text("Another.")
    first, second = (server.next_event("response.create") for _ in range(2))
    assert second["input"] == first["input"]


def test_an_edited_message_replaces_itself_and_what_followed(
    server: ScriptedServer, page: Page
) -> None:
    for text in ("First", "Second"):
        send(page, text)
        expect(page.locator(".user").last).to_contain_text(text)
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        server.next_event("response.create")
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit").first.click()
    expect(page.get_by_label("Message")).to_have_value("First")
    send(page, "Changed")
    expect(answers(page)).to_have_count(1)
    sent = server.next_event("response.create")["input"]
    assert [item["content"] for item in sent] == ["Changed"]


def test_an_answer_at_the_token_limit_offers_to_continue(
    server: ScriptedServer, page: Page
) -> None:
    server.script = ["Half an", Step.LENGTH]
    send(page, "Hi")
    expect(answers(page, "length")).to_contain_text("Reached the token limit")
    server.script = [" answer."]
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_have_count(1)
    server.next_event("response.create")
    roles = [item["role"] for item in server.next_event("response.create")["input"]]
    assert roles == ["user", "assistant", "user"]


def test_a_new_chat_cancels_the_running_answer_and_ignores_the_rest(
    server: ScriptedServer, page: Page
) -> None:
    server.script = ["Old", Step.HOLD]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_count(1)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    server.next_event("response.create")
    server.next_event("response.cancel")
    server.script = ["New"]
    send(page, "Hi again")
    expect(answers(page).locator(".body")).to_have_text("New")
    expect(page.locator("article")).to_have_count(2)


def test_a_reload_keeps_the_conversation_its_open_answer_and_the_unsent_text(
    server: ScriptedServer, page: Page
) -> None:
    server.script = ["Part", Step.HOLD, " and the rest."]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Part")
    page.get_by_label("Message").fill("not sent yet")
    page.reload()
    created = server.next_event("response.create")
    resumed = server.next_event("response.resume")
    assert resumed["response_id"] == f"resp_{created['request_id']}"
    assert (resumed["starting_after"], resumed["stream_id"]) == (1, created["stream_id"])
    expect(page.locator(".user .body")).to_have_text("Hi")
    server.release()
    expect(answers(page).locator(".body")).to_have_text("Part and the rest.")
    expect(answers(page).locator(".stats")).to_have_text(
        re.compile(r"2 tokens\s*\d+ ms to first token\s*80 % cached")
    )
    expect(page.get_by_label("Message")).to_have_value("not sent yet")
    page.reload()
    expect(answers(page).locator(".body")).to_have_text("Part and the rest.")


# --- typing --------------------------------------------------------------------------------------


def test_shift_enter_breaks_the_line_and_enter_sends(server: ScriptedServer, page: Page) -> None:
    page.get_by_label("Message").fill("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    expect(page.get_by_label("Message")).to_have_value("a\nb")
    page.keyboard.press("Enter")
    expect(page.locator(".user .body")).to_have_text("a\nb", use_inner_text=True)
    assert server.next_event("response.create")["input"][0]["content"] == "a\nb"


def test_enter_that_belongs_to_an_input_method_does_not_send(
    server: ScriptedServer, page: Page
) -> None:
    draft = page.get_by_label("Message")
    draft.focus()
    input_method = page.context.new_cdp_session(page)
    composition = {"text": "にほん", "selectionStart": 3, "selectionEnd": 3}
    input_method.send("Input.imeSetComposition", composition)
    expect(draft).to_have_value("にほん")
    draft.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    draft.dispatch_event("keydown", {"key": "Enter", "keyCode": 229})
    input_method.send("Input.insertText", {"text": "日本"})
    expect(draft).to_have_value("日本")
    expect(page.locator("article")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator(".user .body")).to_have_text("日本")
    assert server.next_event("response.create")["input"][0]["content"] == "日本"


# --- what an answer may contain ------------------------------------------------------------------

MARKDOWN = """# Title

Some **bold**, *italic* and `code`, see [the docs](https://example.org/docs).

```python
def f(x):  # comment
    return "<b>" + x
```

1. one
2. two
   - nested

| Name | Size |
|---|---:|
| a | 1 |

> quoted
"""


def test_markdown_becomes_elements(server: ScriptedServer, page: Page) -> None:
    server.script = list(MARKDOWN)  # one character a delta: each half-written state is drawn
    send(page, "Hi")
    expect(answers(page)).to_have_count(1)
    body = answers(page).locator(".body")
    for selector, text in {
        "h2": "Title",
        "p > strong": "bold",
        "p > em": "italic",
        "p > code": "code",
        "pre code": 'def f(x):  # comment\n    return "<b>" + x',
        "pre .code-keyword >> nth=0": "def",
        "ol > li >> nth=0": "one",
        "ol ul > li": "nested",
        "table td.align-right": "1",
        "blockquote": "quoted",
    }.items():
        expect(body.locator(selector)).to_have_text(text)
    link = body.get_by_role("link", name="the docs")
    expect(link).to_have_attribute("href", "https://example.org/docs")
    expect(link).to_have_attribute("rel", "noopener noreferrer")


HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "[click](javascript:window.pwned=1)",
    "[click](  JaVaScRiPt:window.pwned=1)",
    "[click](data:text/html,<script>window.pwned=1</script>)",
    '![x](x" onerror="window.pwned=1)',
    "<a href='javascript:window.pwned=1'>a</a>",
    "`<svg onload=window.pwned=1>`",
    "| <iframe src=javascript:window.pwned=1> |\n|---|\n| <style>*{display:none}</style> |",
    "```<script>\n</code></pre><img src=x onerror=window.pwned=1>\n```",
)


def test_hostile_text_stays_text(server: ScriptedServer, page: Page) -> None:
    server.script = ["\n\n".join(HOSTILE)]
    send(page, HOSTILE[0])
    expect(answers(page)).to_have_count(1)
    shown = page.locator("#conversation")
    for text in ("<img src=x onerror=window.pwned=1>", "<script>window.pwned=1</script>", "<svg"):
        expect(shown).to_contain_text(text)
    tags = "img, script, iframe, style, svg, object, [onerror], [onload], a:not([href^=http])"
    expect(shown.locator(tags)).to_have_count(0)
    assert page.evaluate("window.pwned") is None


def test_code_and_answers_can_be_copied(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    expect(page.locator("#link-text")).to_have_text(MODEL)
    server.script = ["Text\n\n```py\nx = 1\n```\n"]
    send(page, "Hi")
    page.locator("figure.code").get_by_role("button", name="Copy").click()
    expect(page.locator("figure.code").get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    answers(page).locator(".actions").get_by_role("button", name="Copy").click()
    expect(answers(page).locator(".actions").get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == server.script[0]


def test_a_stream_redraws_only_its_last_block(server: ScriptedServer, page: Page) -> None:
    server.script = ["First paragraph.\n\nSec", Step.HOLD, "ond.\n\n", *["word "] * 500]
    send(page, "Hi")
    first = answers(page, "streaming").locator(".body > p").first.element_handle()
    server.release()
    expect(answers(page).locator(".body > p")).to_have_count(3)
    expect(answers(page).locator(".body > p").last).to_have_text(("word " * 500).strip())
    assert first.evaluate("node => node.isConnected")


# --- scrolling -----------------------------------------------------------------------------------


def test_the_view_follows_the_stream_only_from_the_bottom(
    server: ScriptedServer, page: Page
) -> None:
    lines = "line\n\n" * 60
    server.script = [lines, Step.HOLD, lines, "the end"]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_count(1)
    expect(page.locator("#jump")).to_be_hidden()
    assert is_at_bottom(page)
    page.locator("#scroller").hover()
    page.mouse.wheel(0, -800)
    expect(page.locator("#jump")).to_be_visible()
    before = page.locator("#scroller").evaluate("node => node.scrollTop")
    server.release()
    expect(answers(page)).to_contain_text("the end")
    assert page.locator("#scroller").evaluate("node => node.scrollTop") == before
    page.locator("#jump").click()
    expect(page.locator("#jump")).to_be_hidden()
    assert is_at_bottom(page)


def is_at_bottom(page: Page) -> bool:
    gap = "node => node.scrollHeight - node.scrollTop - node.clientHeight"
    return bool(page.locator("#scroller").evaluate(gap) < 2)


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step.FAIL, "the device went away"),
        (Step.REFUSE, "expected top_p in (0, 1]"),
    ],
)
def test_errors_are_shown_under_the_answer(
    server: ScriptedServer, page: Page, step: Step, message: str
) -> None:
    server.script = [step]
    send(page, "Hi")
    expect(answers(page, "failed").get_by_role("alert")).to_have_text(message)
    server.script = ["Better."]
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page).locator(".body")).to_have_text("Better.")


def test_a_cut_answer_goes_on_where_it_was(server: ScriptedServer, open_page: OpenPage) -> None:
    page = open_page(server.url, expect=("status of 500",))
    expect(page.locator("#link-text")).to_have_text(MODEL)
    server.script = ["Some ", Step.HOLD, Step.DROP, "text."]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Some")
    page.get_by_label("Message").fill("the next question")
    server.down = True
    server.release()
    expect(answers(page, "streaming").locator("footer")).to_have_text("Reconnecting …")
    expect(answers(page, "streaming").locator(".body")).to_have_text("Some")
    expect(page.locator("#link-text")).to_have_text("Not connected")
    page.get_by_label("Message").press("Enter")  # nothing to send it on: it stays
    expect(page.get_by_label("Message")).to_have_value("the next question")
    server.down = False
    page.get_by_role("button", name="Retry now").click()
    expect(answers(page).locator(".body")).to_have_text("Some text.")
    expect(answers(page).locator("footer")).not_to_contain_text("Reconnecting")
    expect(page.get_by_label("Message")).to_have_value("the next question")


def test_an_answer_is_cut_again_and_again(server: ScriptedServer, page: Page) -> None:
    server.script = [Step.DROP, "One ", "two ", Step.DROP, "three."]
    send(page, "Hi")
    expect(answers(page).locator(".body")).to_have_text("One two three.")
    expect(page.locator("article")).to_have_count(2)


def test_an_answer_that_the_server_has_no_more_keeps_its_text(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    page = open_page(server.url, expect=("status of 500",))
    expect(page.locator("#link-text")).to_have_text(MODEL)
    server.script = ["Some text", Step.HOLD]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Some text")
    server.forget()
    page.reload()
    expect(answers(page, "dropped").locator(".body")).to_have_text("Some text")
    expect(answers(page, "dropped")).to_contain_text("this is what had arrived")
    server.script = [" and more."]
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator(".body")).to_have_text("and more.")


def test_a_message_that_never_arrived_is_sent_again_once(
    server: ScriptedServer, page: Page
) -> None:
    server.num_deaf = 1
    send(page, "Hi")
    expect(answers(page).locator(".body")).to_have_text("Hello.")
    expect(page.locator("article")).to_have_count(2)
    first = server.next_event("response.create")
    server.next_event("response.resume")
    second = server.next_event("response.create")
    assert second["input"] == first["input"]
    server.num_deaf = 2
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page, "dropped")).to_contain_text("The connection was lost before anything came")


@pytest.mark.parametrize("how", ["Stop", "New chat"])
def test_what_is_stopped_without_a_connection_ends_on_the_server_later(
    server: ScriptedServer, open_page: OpenPage, how: str
) -> None:
    page = open_page(server.url, expect=("status of 500",))
    expect(page.locator("#link-text")).to_have_text(MODEL)
    server.script = ["Some text", Step.HOLD, Step.DROP, Step.HOLD]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_text("Some text")
    server.down = True
    server.release()
    expect(page.locator("#link-text")).to_have_text("Not connected")
    page.get_by_role("button", name=how).click()
    if how == "Stop":
        expect(answers(page, "stopped").locator(".body")).to_have_text("Some text")
    else:
        expect(page.locator("article")).to_have_count(0)
    server.down = False
    page.get_by_role("button", name="Retry now").click()
    created = server.next_event("response.create")
    assert server.next_event("DELETE")["id"] == f"resp_{created['request_id']}"


@pytest.mark.parametrize(
    "storage",
    [
        "sessionStorage['streamkv.messages'] = '[{\"id\": 1}, 7, null'",
        "for (const name of ['messages', 'draft', 'key', 'editing'])"
        ' sessionStorage[`streamkv.${name}`] = \'[7, {"role": "assistant"}]\'',
        "for (const name of ['settings', 'theme']) localStorage[`streamkv.${name}`] = '[[7]]'",
        "Object.defineProperty(window, 'sessionStorage', {get() { throw new Error('no'); }})",
    ],
)
def test_no_stored_value_breaks_the_page(
    server: ScriptedServer, open_page: OpenPage, storage: str
) -> None:
    page = open_page("about:blank", expect=("won't outlive this page",))
    page.add_init_script(storage)
    page.goto(server.url)
    expect(page.locator("#link-text")).to_have_text(MODEL)
    send(page, "Hi")
    expect(answers(page).locator(".body")).to_have_text("Hello.")
    assert server.next_event("response.create")["temperature"] == 0.7


def test_the_key_dialog_tells_a_wrong_key_and_takes_the_right_one(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    server.key = "sk-right"
    page = open_page(server.url, expect=("status of 401",))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    field = dialog.get_by_label("API key")
    field.fill("not sendable")
    dialog.get_by_role("button", name="Connect").click()
    expect(dialog.get_by_role("alert")).to_contain_text("can't send this key")
    field.fill("sk-wrong")
    field.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("Wrong key")
    field.fill("sk-right")
    field.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#link-text")).to_have_text(MODEL)
    send(page, "Hi")
    expect(answers(page)).to_have_count(1)
    assert "sk-right" not in str(page.evaluate("({...localStorage})"))
    page.reload()
    expect(page.locator("#link-text")).to_have_text(MODEL)


def test_a_loading_server_is_shown_until_it_is_ready(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    server.health = (503, {"status": "loading", "detail": "loading weights 50 %"})
    page = open_page(server.url, expect=("status of 503",))
    expect(page.locator("#welcome")).to_contain_text("loading weights 50 %")
    expect(page.locator("#progress .filled")).to_have_count(8)
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_label("Message").fill("typed while loading")
    server.health = (200, {"status": "ok"})
    expect(page.locator("#link-text")).to_have_text(MODEL)
    expect(page.get_by_label("Message")).to_have_value("typed while loading")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


# --- settings and looks --------------------------------------------------------------------------


def test_settings_go_with_each_request_and_outlive_a_reload(
    server: ScriptedServer, page: Page
) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("System prompt").fill("Be brief.")
    for label, value in {"Temperature": "0.5", "Top p": "0.9", "Top k": "40"}.items():
        dialog.get_by_label(label).fill(value)
    dialog.get_by_label("Max tokens").fill("64")
    dialog.get_by_label("Seed").fill("7")
    dialog.get_by_role("button", name="Done").click()
    expect(dialog).to_be_hidden()
    page.reload()
    expect(page.locator("#link-text")).to_have_text(MODEL)
    send(page, "Hi")
    sent = server.next_event("response.create")
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_output_tokens": 64, "seed": 7}
    assert {name: sent[name] for name in wanted} == wanted
    assert sent["instructions"] == "Be brief."


def test_escape_closes_a_dialog_without_stopping_the_answer(
    server: ScriptedServer, page: Page
) -> None:
    server.script = ["Text", Step.HOLD, " ends."]
    send(page, "Hi")
    expect(answers(page, "streaming")).to_have_count(1)
    page.get_by_role("button", name="Settings").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    server.release()
    expect(answers(page).locator(".body")).to_have_text("Text ends.")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_everything_without_sideways_scrolling(
    server: ScriptedServer, open_page: OpenPage, width: int
) -> None:
    page = open_page(server.url, **PHONE | {"viewport": {"width": width, "height": 844}})
    expect(page.locator("#link-text")).to_have_text(MODEL)
    wide = f"{'w' * 200} `{'c' * 200}`\n\n```\n{'x' * 300}\n```\n\n|{'col|' * 20}\n|{'-|' * 20}\n"
    server.script = [MARKDOWN + wide]
    send(page, "u" * 300)
    expect(answers(page)).to_have_count(1)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    inner = "node => node.scrollWidth - node.clientWidth"
    assert page.locator("#scroller").evaluate(inner) == 0
    font_px = page.get_by_label("Message").evaluate("node => getComputedStyle(node).fontSize")
    assert font_px == "16px"  # less makes iOS zoom in
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_role("dialog").evaluate(inner) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(
    server: ScriptedServer, open_page: OpenPage, scheme: str
) -> None:
    page = open_page(server.url, color_scheme=scheme)
    expect(page.locator("#link-text")).to_have_text(MODEL)
    expect(page.locator("#suggestions button").first).to_be_visible()
    ratios = {"suggestion": contrast(page.locator("#suggestions button").first)}
    server.script = [MARKDOWN]
    send(page, "Hi")
    expect(answers(page)).to_have_count(1)
    for selector in (
        ".user .body", ".assistant p", ".assistant a", ".stats", ".actions button", "blockquote p",
        "p > code", "figcaption span", ".code-comment", ".code-string", ".code-keyword", "th",
        "#link-text", ".hint", ".name b",
    ):  # fmt: skip
        ratios[selector] = contrast(page.locator(selector).first)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def contrast(locator: Locator) -> float:
    """WCAG 2.2 contrast ratio of an element's text to the first opaque background behind it."""
    foreground, background = locator.evaluate(
        """node => {
            const canvas = document.createElement("canvas");
            const paint = canvas.getContext("2d", {willReadFrequently: true});
            const rgb = (colour) => {
                paint.fillStyle = colour;
                paint.fillRect(0, 0, 1, 1);
                return [...paint.getImageData(0, 0, 1, 1).data.slice(0, 3)];
            };
            let behind = node;
            const fill = () => getComputedStyle(behind).backgroundColor;
            while (fill() === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [rgb(getComputedStyle(node).color), rgb(fill())];
        }"""
    )
    lighter, darker = sorted((luminance(foreground), luminance(background)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(rgb: list[int]) -> float:
    linear = [
        value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4
        for value in rgb
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_theme_button_overrides_the_system_and_is_remembered(
    server: ScriptedServer, open_page: OpenPage
) -> None:
    page = open_page(server.url, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark


def test_every_control_has_a_name_and_keyboard_focus_shows(
    server: ScriptedServer, page: Page
) -> None:
    send(page, "Hi")
    expect(answers(page)).to_have_count(1)
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, a")]
            .filter((node) => node.checkVisibility() && !node.labels?.length)
            .filter((node) => !node.textContent.trim() && !node.getAttribute("aria-label"))
            .map((node) => node.outerHTML)"""
    )
    assert unnamed == []
    page.get_by_label("Message").press("Shift+Tab")
    focused = page.locator(":focus-visible")
    expect(focused).to_have_count(1)
    assert focused.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"


def test_the_page_stands_on_its_own_files() -> None:
    """No build step, nothing from another host, no markup out of strings."""
    web = Path(__file__).parents[2] / "web"
    sources = {path.name: path.read_text("utf-8") for path in web.glob("*.[hjc][ts]*")}
    assert {"index.html", "app.js", "style.css"} <= sources.keys()
    for name, text in sources.items():
        assert not re.search(r"(innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b", text)
        assert not re.search(r"(src|href|url|from|import)\W{1,3}(https?:)?//\w", text), name
