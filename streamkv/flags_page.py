"""docs/flags.md, made from the fields of the config Structs and the table of vLLM's options.

    python -m streamkv.flags_page > docs/flags.md

Invariant: nothing is said there that the command line doesn't do.
"""

from __future__ import annotations

import msgspec

from .config import EngineConfig, ServerConfig
from .fields import Field, fields_of, flag_of
from .flags import shown_default
from .vllm_options import OPTIONS, SHORT, Option

HEAD = """\
# Flags

Every option of `streamkv serve` can be set by a flag, by an environment variable, and in a file. A
flag beats the variable, the variable beats the file, the file beats the default. The other commands
that take a model read the same variables and the same file; `LLM` and `AsyncEngine` read neither,
they take options as arguments.

- The file is TOML, named by `--config FILE` or `STREAMKV_CONFIG`. Its keys are the flags' names
  without `--`, with `-` or `_`, in no section; flags that may be repeated are lists there. A key
  that isn't known and a value of a wrong type are errors.
- A variable whose name begins with `STREAMKV_` and that nothing reads is named in a warning.
- Flags may be written with `_` too (`--max_num_seqs`); those that are on or off have a `--no-`
  form, and take `true` or `false`.
- Flags that may be repeated also take several words; the last of these is the model, if that is
  named nowhere else on the line. In a variable, commas stand between the words.
- A whole number may end in `k`, `m` or `g` for thousands, millions and so on (`8k` is 8000), or in
  `K`, `M` or `G` for powers of 1024 (`8K` is 8192). Bytes may have a fraction: `0.5G`.
- `python -m streamkv.entrypoints.openai.api_server` takes the same flags as `streamkv serve`.

```toml
model = "smollm2-135m-instruct"
port = 9000
max-model-len = "2K"
api-key = ["one", "another"]
enable-prefix-caching = false
```
"""

VLLM = """\
## Options of vLLM

Options that vLLM has as well are above, under the same name. These others are known to
`streamkv serve` and to `LLM(...)`, so that scripts start unchanged. A value that asks for what
streamkv does anyway is taken, any other is an error that names the option. `none`, `{}` and `[]`
are always taken.

| flags | take | otherwise |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        (HEAD, _table("The engine", EngineConfig), _table("The server", ServerConfig), _vllm())
    )


def _table(title: str, config_type: type[msgspec.Struct]) -> str:
    head = f"## {title}\n\n{(config_type.__doc__ or '').strip()}\n\n"
    names = (
        "| flag | takes | default | meaning | variable | in a file |\n|---|---|---|---|---|---|\n"
    )
    return head + names + "".join(map(_row, fields_of(config_type)))


def _row(field: Field) -> str:
    flags = ", ".join(f"`{name}`" for name in dict.fromkeys([field.flag, *field.flags]))
    cells = (flags, _taken(field), _default(field), field.help, f"`{field.variable}`")
    return f"| {' | '.join(cells)} | `{field.key}` |\n"


def _taken(field: Field) -> str:
    """The values of the field, and other words for them."""
    one = field.item if field.repeats else field
    kinds: dict[object, str] = {bool: "on or off", int: "whole number", float: "number"}
    words = ", ".join(one.choices) or kinds.get(one.type, "text")
    if one.counts_bytes:
        return f"bytes {one.bounds}, as 8G or 0.5G"
    same = ", ".join(f"{word} is {value}" for word, value in field.same.items())
    return f"{words} {one.bounds}".strip() + (f" ({same})" if same else "")


def _default(field: Field) -> str:
    if field.type is bool:
        return "on" if field.default else "off"
    return f"{field.default:g}" if isinstance(field.default, float) else shown_default(field)


def _vllm() -> str:
    alike: dict[Option, list[str]] = {}
    for name, option in OPTIONS.items():
        flags = [flag_of(name), SHORT[name]] if name in SHORT else [flag_of(name)]
        alike.setdefault(option, []).extend(f"`{flag}`" for flag in flags)
    return VLLM + "".join(
        f"| {' '.join(flags)} | {_neutral(option)} | {option.advice} |\n"
        for option, flags in alike.items()
    )


def _neutral(option: Option) -> str:
    return "anything" if option.takes_any else ", ".join(option.neutral) or "nothing"


if __name__ == "__main__":
    print(page(), end="")
