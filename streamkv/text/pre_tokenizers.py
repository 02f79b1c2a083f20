"""Pre-tokenizers by name: how a byte-level vocabulary's text is cut into words before BPE.

Owns the table of what `tokenizer.ggml.pre` may say. Knows nothing about files. Invariant: a name
without an exact rule is not in the table, because a wrong cut gives plausible tokens that the model
was not trained on.

A rule is a chain of patterns, applied one after the other: each cuts every piece into its matches
and what lies between them. The patterns, and whether a text is normalized first, follow the models'
own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tokenizers
from tokenizers import pre_tokenizers


class PreTokenizer(NamedTuple):
    """How text is cut before BPE runs inside each piece."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is normalized to NFC first
    ignore_merges: bool = False  # a piece that is a token as a whole is not built by merges
    add_bos: bool = False  # when the file doesn't say

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """Cuts text, and writes each piece in GPT-2's byte alphabet."""
        cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])


_DIGIT = r"\p{N}"  # Unicode's Nd, Nl and No, each on its own
_LINE_ENDS = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"  # a space before a word stays with it
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_GPT2_WORDS = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _words(letters: str, digits: str, ends: str, letter: str = r"\p{L}") -> str:
    """The pattern of the tokenizers after GPT-4's: `letters` are the alternatives for words, `ends`
    may follow punctuation and are no letters."""
    return rf"{letters}|{digits}| ?[^\s{letter}\p{{N}}]+{ends}|{_LINE_ENDS}|{_SPACES}"


def _after(letters: str) -> str:
    """A word, with one character before it that is no letter, digit or line end."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{letters}"


_LETTERS = _after(r"\p{L}+")
_LETTERS_AND_MARKS = _after(r"[\p{L}\p{M}]+")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING_LOW = _after(f"{_UPPER}*{_LOWER}+")  # aWord, Word, word
_BEGINNING_HIGH = _after(f"{_UPPER}+{_LOWER}*")  # WORD

_LLAMA3_WORDS = _words(f"{_CONTRACTIONS}|{_LETTERS}", r"\p{N}{1,3}", r"[\r\n]*")
_QWEN2_WORDS = _words(f"{_CONTRACTIONS}|{_LETTERS}", _DIGIT, r"[\r\n]*")
_QWEN35_WORDS = _words(f"{_CONTRACTIONS}|{_LETTERS_AND_MARKS}", _DIGIT, r"[\r\n]*", r"\p{L}\p{M}")
_TEKKEN_WORDS = _words(f"{_ENDING_LOW}|{_BEGINNING_HIGH}", _DIGIT, r"[\r\n/]*")
_LLAMA4_WORDS = _words(
    f"{_ENDING_LOW}{_CONTRACTIONS}?|{_BEGINNING_HIGH}{_CONTRACTIONS}?", r"\p{N}{1,3}", r"[\r\n/]*"
)

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + f"{_LINE_ENDS}|{_SPACES}",
)
# Letters of scripts with cases, with the gaps that the models' own pattern has.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    _DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_WORDS,), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(add_bos=False),  # Llama 3's, before it said to add a beginning
    "llama4": PreTokenizer((_LLAMA4_WORDS,), ignore_merges=True),
    "tekken": PreTokenizer((_TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_WORDS,), nfc=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
}
