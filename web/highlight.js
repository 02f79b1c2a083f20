// Owns the colouring of code: tokenize(text, lang) cuts it into {kind, text} pieces. One small
// lexer for all languages: comments, strings, numbers, keywords. Invariant: the pieces joined are
// the text.

const PLAIN = ["", "text", "txt", "plain", "markdown", "md", "output"];
const HASH = ["py", "python", "sh", "bash", "shell", "rb", "ruby", "yaml", "yml", "toml", "r"];
const STRING = [
  String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`,
  String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'`,
  "`(?:[^`\\\\]|\\\\.)*`",
].join("|");
const KEYWORDS = `
  and as assert async await bool break case catch char class const continue def del do double elif
  else enum except export extends false False finally float fn for from func function global if impl
  import in int interface is lambda let long match mod mut new nil None not null or pass private pub
  public raise return self static string struct super switch this throw trait true True try type use
  using var void while with yield`.trim().split(/\s+/);

export function tokenize(text, lang) {
  const name = lang.toLowerCase();
  if (PLAIN.includes(name)) return [{ text }];
  const comment = HASH.includes(name) ? "#[^\\n]*" : String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`;
  const source = [
    `(?<comment>${comment})`,
    `(?<string>${STRING})`,
    String.raw`(?<number>\b\d[\w.]*)`,
    String.raw`(?<keyword>\b(?:${KEYWORDS.join("|")})\b)`,
  ].join("|");
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(new RegExp(source, "g"))) {
    if (match.index > at) pieces.push({ text: text.slice(at, match.index) });
    const [kind] = Object.entries(match.groups).find(([, found]) => found !== undefined);
    pieces.push({ kind, text: match[0] });
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push({ text: text.slice(at) });
  return pieces;
}
