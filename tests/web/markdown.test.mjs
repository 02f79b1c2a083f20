import assert from "node:assert/strict";
import { test } from "node:test";

import { tokenize } from "../../web/highlight.js";
import { parseBlocks, parseInline, safeHref } from "../../web/markdown.js";

/** What the spans say as HTML: short to write down, and the notation CommonMark's own examples use. */
const html = (text) => parseInline(text).map(spanHtml).join("");
function spanHtml(span) {
  if (typeof span === "string") return span.replace(/[<>&]/g, (char) => `&#${char.charCodeAt(0)};`);
  if (span.type === "code") return `<code>${spanHtml(span.text)}</code>`;
  const open = span.type === "link" ? `a ${span.href}` : span.type;
  return `<${open}>${span.spans.map(spanHtml).join("")}</>`;
}

const types = (text) => parseBlocks(text).map((block) => block.type);
const plain = (span) => (typeof span === "string" ? span : span.text ?? span.spans.map(plain).join(""));

test("emphasis nests, and marks that close nothing are text", () => {
  assert.equal(html("a **b *c* d** e"), "a <strong>b <em>c</> d</> e");
  assert.equal(html("***x***"), "<strong><em>x</></>");
  assert.equal(html("*a **b** c*"), "<em>a <strong>b</> c</>");
  assert.equal(html("~~gone~~ __strong__ _em_"), "<del>gone</> <strong>strong</> <em>em</>");
  assert.equal(html("2 * 3 * 4, **open, snake_case_name, ****"), "2 * 3 * 4, **open, snake_case_name, ****");
});

test("code spans keep what they hold", () => {
  assert.equal(html("`**x**` and ``a`b`` and `` ` ``"), "<code>**x**</code> and <code>a`b</code> and <code>`</code>");
  assert.equal(html("an ` alone"), "an ` alone");
  assert.equal(html("`<b>`"), "<code>&#60;b&#62;</code>");
});

test("a backslash takes a mark's meaning away", () => {
  assert.equal(html("\\*a\\* \\`b\\` \\n"), "*a* `b` \\n");
});

test("links point to http and https, anything else is text", () => {
  assert.equal(html("[a *b*](https://x.org/y)"), "<a https://x.org/y>a <em>b</></>");
  assert.equal(html("[see **https://a.org**](https://x.org/)"), "<a https://x.org/>see <strong>https://a.org</></>");
  assert.equal(html("[a](https://x.org/w_(z))"), "<a https://x.org/w_(z)>a</>");
  assert.equal(html("<https://x.org/>, https://x.org/a. (https://x.org/b)"),
    "<a https://x.org/>https://x.org/</>, <a https://x.org/a>https://x.org/a</>. (<a https://x.org/b>https://x.org/b</>)");
  for (const address of ["javascript:alert(1)", "JAVASCRIPT:alert(1)", "data:text/html,x", "file:///etc", "//x.org", "x", ""]) {
    assert.equal(safeHref(address), "", address);
    assert.ok(!html(`[a](${address})`).includes("<a"), address);
  }
});

test("each kind of block is found", () => {
  const text = "# h\n\npara\n\n---\n\n> q\n\n- l\n\n1. l\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nx\n```";
  assert.deepEqual(types(text), ["heading", "paragraph", "rule", "quote", "list", "list", "table", "code"]);
  assert.deepEqual(types("para\n# h\npara\n- l\n```\nx"), ["paragraph", "heading", "paragraph", "list", "code"]);
});

test("prose with numbers and dashes is no list", () => {
  assert.deepEqual(types("It was\n1984. A cold day -\n-5 degrees"), ["paragraph"]);
});

test("lists nest, number from their start and hold several blocks", () => {
  const [list] = parseBlocks("3. a\n4. b\n   - c\n     more\n   - d\n\n   para\n5. e");
  assert.equal(list.start, 3);
  assert.equal(list.items.length, 3);
  const [, second] = list.items;
  assert.deepEqual(second.map((block) => block.type), ["paragraph", "list", "paragraph"]);
  assert.equal(second[1].items.length, 2);
  assert.equal(parseBlocks("- a\n\n- b\n\n- c").length, 1);
  assert.deepEqual(types("- a\n1. b"), ["list", "list"]);
});

test("a code block keeps its text and its language, closed or not", () => {
  const [code] = parseBlocks("````py title\na\n```\n  b\n````\n");
  assert.deepEqual([code.lang, code.text, code.closed], ["py", "a\n```\n  b", true]);
  const [open] = parseBlocks("~~~\na");
  assert.deepEqual([open.text, open.closed], ["a", false]);
});

test("a table's rows have the head's columns", () => {
  const [table] = parseBlocks("a | b | c\n:--|:-:|--:\n1 | x \\| y\n1 | 2 | 3 | 4\n");
  assert.deepEqual(table.align, ["left", "center", "right"]);
  assert.deepEqual(table.rows.map((row) => row.map((cell) => cell.map(plain).join(""))), [["1", "x | y", ""], ["1", "2", "3"]]);
});

const SAMPLE = "# T\n\nA **b** `c` [d](https://e.f) *g\n\n```py\nx = 1\n```\n\n- 1\n  - 2\n\n> q\n\n|a|b|\n|-|-|\n|1|2|\n";

test("every beginning of a text can be drawn, and finished blocks stay as they were", () => {
  for (let end = 0; end < SAMPLE.length; end += 1) {
    const now = parseBlocks(SAMPLE.slice(0, end));
    const next = parseBlocks(SAMPLE.slice(0, end + 1));
    assert.deepEqual(next.slice(0, now.length - 1), now.slice(0, -1), SAMPLE.slice(0, end + 1));
  }
});

test("no letter of a text is lost", () => {
  const letters = (text) => text.replace(/[^a-z0-9]/gi, "");
  const words = (block) => [block.text, ...(block.spans ?? []).map(plain), ...(block.blocks ?? []).map(words),
    ...(block.items ?? []).flat().map(words), ...[block.head ?? [], ...(block.rows ?? [])].flat(2).map(plain)].join("");
  const marks = ["*", "**", "_", "`", "```\n", "~~", "\n", "\n\n", "- ", "1. ", "> ", "# ", "  ", "|", "[", "](", ")", "<", "\\"];
  let seed = 1;
  const random = (bound) => (seed = (seed * 48271) % 2147483647) % bound;
  for (let round = 0; round < 3000; round += 1) {
    const text = Array.from({ length: random(20) }, (_, index) => marks[random(marks.length)] + "abcdefghij"[index % 10]).join("");
    if (/```|\||1\./.test(text)) continue; // info strings, spare cells and list numbers aren't shown
    assert.equal(letters(parseBlocks(text).map(words).join("")), letters(text), JSON.stringify(text));
  }
});

test("hostile lengths take linear time", () => {
  const repeated = ["*a ", "`", "[", "> ", "- ", "**", "`a``b", "[a](", "![](<", "|", "- a\n", "1. a\n\n", "*a**b", "~~a", "\\", "a\n", "https://a", "# "];
  for (const part of repeated) {
    const start = performance.now();
    parseBlocks(part.repeat(20_000 / part.length));
    assert.ok(performance.now() - start < 1000, part);
  }
});

test("coloured code is the same code", () => {
  const code = "def f(x):  # \"no string\"\n    '''doc\n    '''\n    return \"a # b\" + 'it\\'s' + f'{x}' // 0x1F\n\"open";
  for (const lang of ["python", "js", "sql", "c", "", "brainfuck"]) {
    assert.equal(tokenize(code, lang).map((piece) => piece.text).join(""), code, lang);
  }
  const kinds = tokenize(code, "python").filter((piece) => piece.kind).map((piece) => [piece.kind, piece.text]);
  assert.deepEqual(kinds.slice(0, 4), [
    ["keyword", "def"], ["comment", '# "no string"'], ["string", "'''doc\n    '''"], ["keyword", "return"],
  ]);
});
