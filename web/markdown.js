// Owns the reading of markdown into plain data: parseBlocks(text) gives blocks, parseInline(text)
// spans. Knows no DOM (draw.js makes nodes of it). Invariants: every character of the text that is
// not markup comes out as text; HTML is text like any other; a link is http or https, or it is
// text; nesting is bounded; half-written markdown (a stream's usual state) never throws.

const MAX_DEPTH = 8; // of quotes, lists and emphasis; what is deeper stays text

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|[ \t]*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Blocks of a text, each with its source as `raw`: equal sources can share what was drawn. */
export function parseBlocks(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    blocks.push({ ...block, raw: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

// Each reader takes the lines and where to start, and gives [block, index after the block].
function readBlock(lines, at, depth) {
  const line = lines[at];
  let match;
  if ((match = FENCE.exec(line))) return readFence(lines, at, match);
  if ((match = HEADING.exec(line))) {
    const spans = parseInline(match[2].replace(/[ \t]+#+[ \t]*$/, "").trim());
    return [{ type: "heading", level: match[1].length, spans }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, ""));
    return [{ type: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1) }, end];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && !startsBlock(lines, end)) end += 1;
  const source = lines.slice(at, end).map((part) => part.trim()).join("\n");
  return [{ type: "paragraph", spans: parseInline(source) }, end];
}

function readFence(lines, at, [, indent, fence, info]) {
  let end = at + 1;
  const isClose = (line) => {
    const mark = line.trim();
    return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
  };
  while (end < lines.length && !isClose(lines[end])) end += 1;
  const margin = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(margin, "")).join("\n");
  const closed = end < lines.length;
  return [{ type: "code", lang: info.trim().split(/\s/)[0], text, closed }, closed ? end + 1 : end];
}

function readList(lines, at, depth) {
  const [, margin, firstMark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(firstMark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || RULE.test(lines[end]) || match[1] !== margin) break;
    if (/\d/.test(match[2]) !== ordered) break;
    const offset = match[1].length + match[2].length + 1;
    const inner = [match[3] ?? ""];
    end += 1;
    // An item goes on with what is indented more than its marker, and with lines of its paragraph.
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      const indent = line.length - line.trimStart().length;
      if (!line.trim()) {
        const next = lines[end + 1] ?? "";
        if (!next.trim() || next.length - next.trimStart().length <= match[1].length) break;
      } else if (indent <= match[1].length) {
        if (ITEM.test(line) || startsBlock(lines, end) || !inner.at(-1).trim()) break;
      }
      inner.push(line.slice(Math.min(indent, offset)));
    }
    items.push(parseBlocks(inner.join("\n"), depth + 1));
    // Blank lines between two items of the same list belong to the list.
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    const follower = ITEM.exec(lines[next] ?? "");
    if (follower && /\d/.test(follower[2]) === ordered) end = next;
  }
  return [{ type: "list", ordered, start: ordered ? parseInt(firstMark, 10) : 1, items }, end];
}

const isTable = (lines, at) =>
  lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("|");

function readTable(lines, at) {
  const cells = (line) => {
    const row = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
    return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  };
  const align = cells(lines[at + 1]).map((rule) => {
    if (!rule.endsWith(":")) return "left";
    return rule.startsWith(":") ? "center" : "right";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const head = cells(lines[at]).map((cell) => parseInline(cell));
  const rows = lines.slice(at + 2, end).map((line) => {
    const row = cells(line);
    return head.map((_, column) => parseInline(row[column] ?? ""));
  });
  return [{ type: "table", align, head, rows }, end];
}

function startsBlock(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (QUOTE.test(line) || isTable(lines, at)) return true;
  // A number other than 1 inside a paragraph is prose: "it was in\n1984. Nobody".
  return /^ *([-*+]|1[.)])[ \t]+\S/.test(line);
}

const LINK_TEXT = String.raw`!?\[((?:[^[\]\\]|\\.)*)\]`;
const LINK_ADDRESS = String.raw`<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?`;
const LINK = new RegExp(`${LINK_TEXT}\\([ \\t]*${LINK_ADDRESS}(?:[ \\t]+"[^"]*")?[ \\t]*\\)`, "y");
const ANGLE_LINK = /<(https?:\/\/[^\s<>]+)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"`*]+/iy;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** The address if a link may point there (http or https), else "". */
export function safeHref(address) {
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : "";
  } catch {
    return "";
  }
}

/** Spans of one paragraph: strings, and {type: code|strong|em|del|link, text | spans, href}. */
export function parseInline(text, depth = 0) {
  const spans = [];
  const unclosed = new Set(); // marks known to have no end, so that a text of openers stays linear
  let plain = "";
  let at = 0;
  const push = (span, end) => {
    if (plain) spans.push(plain);
    plain = "";
    spans.push(span);
    at = end;
  };
  while (at < text.length) {
    const span = depth < MAX_DEPTH && readSpan(text, at, depth, unclosed);
    if (span?.literal) {
      plain += span.literal;
      at = span.end;
    } else if (span) push(span.span, span.end);
    else plain += text[at++];
  }
  if (plain) spans.push(plain);
  return spans;
}

// The span that starts exactly here: {span, end}, {literal, end} for escapes, or null.
function readSpan(text, at, depth, unclosed) {
  const char = text[at];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
    return { literal: text[at + 1], end: at + 2 };
  }
  if (char === "`") return readCode(text, at, unclosed);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) {
    const match = matchAt(LINK, text, at);
    const href = match && safeHref(match[2]);
    if (!href) return null;
    const spans = parseInline(match[1] || href, depth + 1).flatMap(unlink);
    return { span: { type: "link", href, spans }, end: at + match[0].length };
  }
  if (char === "<" || char === "h" || char === "H") return readAddress(text, at);
  return "*_~".includes(char) ? readEmphasis(text, at, depth, unclosed) : null;
}

// A link holds no links: what they say stays.
function unlink(span) {
  if (!span.spans) return span;
  const spans = span.spans.flatMap(unlink);
  return span.type === "link" ? spans : { ...span, spans };
}

function readCode(text, at, unclosed) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const fence = "`".repeat(width);
  let end = unclosed.has(fence) ? -1 : text.indexOf(fence, at + width);
  while (end >= 0 && text[end + width] === "`") {
    while (text[end] === "`") end += 1;
    end = text.indexOf(fence, end);
  }
  if (end < 0) {
    unclosed.add(fence);
    return { literal: fence, end: at + width };
  }
  const code = text.slice(at + width, end);
  const padded = /^ .*[^ ].* $/s.test(code);
  return { span: { type: "code", text: padded ? code.slice(1, -1) : code }, end: end + width };
}

function readAddress(text, at) {
  const angle = matchAt(ANGLE_LINK, text, at);
  const bare = /\w/.test(text[at - 1] ?? "") ? null : matchAt(BARE_LINK, text, at);
  if (!angle && !bare) return null;
  let address = angle ? angle[1] : bare[0].replace(/[.,;:!?'\]}_]+$/, "");
  if (!angle && address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  const href = safeHref(address);
  if (!href) return null;
  const end = at + (angle ? angle[0] : address).length;
  return { span: { type: "link", href, spans: [address] }, end };
}

function readEmphasis(text, at, depth, unclosed) {
  for (const [mark, type] of MARKS) {
    if (!text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const start = at + mark.length;
    if (!/\S/.test(text[start] ?? "")) continue;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) continue; // snake_case
    const end = findClose(text, start, mark);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    const spans = parseInline(text.slice(start, end), depth + 1);
    return { span: { type, spans }, end: end + mark.length };
  }
  // A run that opens nothing is text as a whole, so that "**" isn't read as an empty "*" pair.
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return { literal: text.slice(at, end), end };
}

function findClose(text, from, mark) {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end)) {
    let runEnd = end;
    while (text[runEnd] === mark[0]) runEnd += 1;
    const width = runEnd - end;
    const isCloser = end > from && !/[\s\\]/.test(text[end - 1]);
    const isInWord = mark[0] === "_" && /\w/.test(text[runEnd] ?? "");
    const fits = mark.length === 1 ? width !== 2 : true;
    if (isCloser && !isInWord && fits) return runEnd - mark.length;
    end = runEnd;
  }
  return -1;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}
