// Owns the colouring of code: tokenize(text, lang) cuts it into {kind, text} pieces. One small lexer for
// all languages: comments, strings, numbers, keywords. Invariant: the pieces joined are the text.

const HASH = new Set(["py", "python", "sh", "bash", "shell", "rb", "ruby", "yaml", "yml", "toml", "r", "perl"]);
const DASH = new Set(["sql", "lua", "haskell", "hs"]);
const PLAIN = new Set(["", "text", "txt", "plain", "markdown", "md", "output"]);

const STRING = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|${"`"}(?:[^${"`"}\\]|\\.)*${"`"}`;
const WORDS =
  "abstract and as assert async await break case catch class const continue def default defer delete do elif else " +
  "end enum except export extends extern false False finally fn for foreach from func function global go goto if impl import " +
  "in instanceof interface is lambda let loop match mod module mut namespace new nil None nonlocal not null or package " +
  "pass private protected pub public raise return self static struct super switch template then this throw trait true " +
  "True try type typedef typeof union unless unsafe use using var virtual void when where while with yield " +
  "bool char double float int long short unsigned string";
const SQL = "select from where insert into update delete create table join left right inner on group by order limit having values set as and or not null";

export function tokenize(text, lang) {
  const name = lang.toLowerCase();
  if (PLAIN.has(name)) return [{ text }];
  const comment = HASH.has(name) ? "#[^\\n]*" : DASH.has(name) ? "--[^\\n]*" : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  const words = (name === "sql" ? SQL : WORDS).split(" ").join("|");
  const source = `(?<comment>${comment})|(?<string>${STRING})|(?<number>\\b\\d[\\w.]*)|(?<keyword>\\b(?:${words})\\b)`;
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
