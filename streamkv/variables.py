"""Environment variables whose names begin with STREAMKV_: which there are, and what isn't one.

Owns the list of those that no field stands for. Invariant: none of them is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from .config import EngineConfig, ServerConfig
from .errors import ConfigError
from .fields import fields_of, guess, variable_of
from .vllm_options import OPTIONS, check

OTHERS = ("STREAMKV_CACHE", "STREAMKV_CONFIG", "STREAMKV_CPU_ISA", "STREAMKV_TUNING")


def check_variables(environ: Mapping[str, str], *, given: Container[str] = ()) -> None:
    """ConfigError for those of vLLM's options that ask for what can't be had, unless a flag that
    was given says otherwise."""
    for name in OPTIONS:
        variable = variable_of(name)
        if name not in given and (value := environ.get(variable)):
            try:
                check({name: value})
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error.message}") from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Those that are set and nothing reads, each with a guess at what was meant."""
    fields = (*fields_of(EngineConfig), *fields_of(ServerConfig))
    read = [field.variable for field in fields]
    known = {*read, *OTHERS, *map(variable_of, OPTIONS)}
    unknown = []
    for name in sorted(environ):
        if name.startswith(variable_of("")) and name not in known:
            hint = guess(name, [*read, *OTHERS])
            unknown.append(f"{name} ({hint})" if hint else name)
    return unknown
