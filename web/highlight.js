// Owns the colouring of code: tokenize(text, lang) cuts it into {kind, text} pieces. One small
// lexer for all languages: comments, strings, numbers, keywords. Invariant: the pieces joined are
// the text.

const words = (text) => text.trim().split(/\s+/);
const HASH = words("py python sh bash shell rb ruby yaml yml toml r perl dockerfile makefile");
const DASH = words("sql lua haskell hs");
const PLAIN = ["", ...words("text txt plain markdown md output")];

const COMMENT = {
  hash: String.raw`#[^\n]*`,
  dash: String.raw`--[^\n]*`,
  slash: String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`,
};
const STRING = [
  String.raw`"""[^]*?(?:"""|$)`,
  String.raw`'''[^]*?(?:'''|$)`,
  ...['"', "'"].map((quote) => String.raw`${quote}(?:[^${quote}\\\n]|\\.)*${quote}`),
  "`(?:[^`\\\\]|\\\\.)*`",
].join("|");
const KEYWORDS = words(`
  abstract and as assert async await bool break case catch char class const continue def default
  defer delete do double elif else end enum except export extends extern false False finally float
  fn for foreach from func function global go goto if impl import in instanceof int interface is
  lambda let long loop match mod module mut namespace new nil None nonlocal not null or package pass
  private protected pub public raise return self short signed static string struct super switch
  template then this throw trait true True try type typedef typeof union unless unsafe unsigned use
  using var virtual void when where while with yield`);
const SQL_KEYWORDS = words(`
  and as by create delete from group having inner insert into join left limit not null on or order
  right select set table update values where`);

export function tokenize(text, lang) {
  const name = lang.toLowerCase();
  if (PLAIN.includes(name)) return [{ text }];
  const comment = HASH.includes(name) ? "hash" : DASH.includes(name) ? "dash" : "slash";
  const keywords = name === "sql" ? SQL_KEYWORDS : KEYWORDS;
  const source = [
    `(?<comment>${COMMENT[comment]})`,
    `(?<string>${STRING})`,
    String.raw`(?<number>\b\d[\w.]*)`,
    String.raw`(?<keyword>\b(?:${keywords.join("|")})\b)`,
  ].join("|");
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(new RegExp(source, name === "sql" ? "gi" : "g"))) {
    if (match.index > at) pieces.push({ text: text.slice(at, match.index) });
    const [kind] = Object.entries(match.groups).find(([, found]) => found !== undefined);
    pieces.push({ kind, text: match[0] });
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push({ text: text.slice(at) });
  return pieces;
}
