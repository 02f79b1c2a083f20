// Owns the drawing of markdown blocks as DOM nodes. Knows nothing of the conversation. Invariant:
// after drawMarkdown(element, text) the element shows exactly text, and the nodes of blocks whose
// source did not change are the same nodes as before: a stream redraws its last block only.

import { h } from "./dom.js";
import { tokenize } from "./highlight.js";
import { parseBlocks } from "./markdown.js";

const drawn = new WeakMap(); // element -> its blocks as last drawn

export function drawMarkdown(element, text) {
  const blocks = parseBlocks(text);
  const before = drawn.get(element) ?? [];
  drawn.set(element, blocks);
  blocks.forEach((block, index) => {
    const node = element.children[index];
    const old = before[index];
    if (!node) element.append(drawBlock(block));
    else if (old.raw === block.raw && old.closed === block.closed) return;
    else if (isGrownCode(old, block)) node.querySelector("code").textContent = block.text;
    else node.replaceWith(drawBlock(block));
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
}

// Code that still streams keeps its box, and how far it was scrolled.
const isGrownCode = (old, block) =>
  old.type === "code" && block.type === "code" && !block.closed && old.lang === block.lang;

const drawSpans = (spans) =>
  spans.map((span) => {
    if (typeof span === "string") return span;
    if (span.type === "code") return h("code", {}, span.text);
    if (span.type !== "link") return h(span.type, {}, drawSpans(span.spans));
    const safety = { target: "_blank", rel: "noopener noreferrer" };
    return h("a", { href: span.href, ...safety }, drawSpans(span.spans));
  });

const drawBlocks = (blocks) => blocks.map(drawBlock);

function drawBlock(block) {
  switch (block.type) {
    case "heading":
      // The page has its own h1: a model's headings start one level below.
      return h(`h${Math.min(block.level + 1, 6)}`, {}, drawSpans(block.spans));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, drawBlocks(block.blocks));
    case "code":
      return drawCode(block);
    case "list":
      return drawList(block);
    case "table":
      return drawTable(block);
    default:
      return h("p", {}, drawSpans(block.spans));
  }
}

function drawList({ ordered, start, items }) {
  const rows = items.map((blocks) => {
    const [first, ...rest] = blocks;
    const isTight = first?.type === "paragraph" && rest.every((block) => block.type === "list");
    return h("li", {}, isTight ? [drawSpans(first.spans), drawBlocks(rest)] : drawBlocks(blocks));
  });
  return ordered ? h("ol", { start }, rows) : h("ul", {}, rows);
}

function drawTable({ align, head, rows }) {
  const side = (column) => ({ class: `align-${align[column] ?? "left"}` });
  const draw = (tag, cells) => cells.map((spans, column) => h(tag, side(column), drawSpans(spans)));
  const body = rows.map((cells) => h("tr", {}, draw("td", cells)));
  const table = h("table", {}, h("thead", {}, h("tr", {}, draw("th", head))), h("tbody", {}, body));
  return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
}

function drawCode({ lang, text, closed }) {
  const pieces = closed ? tokenize(text, lang) : [{ text }];
  const spans = pieces.map((piece) =>
    piece.kind ? h("span", { class: `code-${piece.kind}` }, piece.text) : piece.text,
  );
  return h(
    "figure",
    { class: "code" },
    h(
      "figcaption",
      {},
      h("span", {}, lang || "text"),
      h("button", { type: "button", class: "quiet", "data-action": "copy-code" }, "Copy"),
    ),
    h("pre", { tabindex: 0, "aria-label": "Code" }, h("code", {}, spans)),
  );
}
