"""What can be asked of the commands for a terminal: one Struct each, whose fields become flags
(flags.py).

Imports nothing heavy: the command line reads it for `--help`. What is None was not asked for: the
checkpoint's own defaults stand, then the API's.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

# Of EngineConfig: what says which files to fetch.
PULL_FLAGS = ("model", "revision", "download_dir")


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens; ranges are those of SamplingParams. The seed is the engine's."""

    max_tokens: Annotated[
        int | None,
        Meta(
            description="tokens of an answer at most (default: the checkpoint's, else 256 for a "
            "text to continue and what the context holds for a message)"
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Meta(
            description="0 takes the likeliest token (default: the checkpoint's, else 0.7 in a "
            "chat and 1 elsewhere)"
        ),
    ] = None
    top_p: Annotated[
        float | None, Meta(description="share of probability to choose from, likeliest first")
    ] = None
    top_k: Annotated[
        int | None, Meta(description="tokens to choose from, likeliest first (0: all)")
    ] = None
    min_p: Annotated[
        float | None, Meta(description="probability to be chosen from, as a share of the best")
    ] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="above 1: tokens that were there already become less likely")
    ] = None
    stop: Annotated[
        tuple[str, ...], Meta(description="text that ends an answer; repeat for several")
    ] = ()

    def asked(self) -> dict[str, Any]:
        """The fields of SamplingParams that were asked for."""
        values = {name: getattr(self, name) for name in SamplingConfig.__struct_fields__}
        return {name: value for name, value in values.items() if value not in (None, ())}


class ChatConfig(SamplingConfig, frozen=True, kw_only=True):
    """A conversation."""

    system: Annotated[str, Meta(description="what the model is told before the conversation")] = ""


class GenerateConfig(SamplingConfig, frozen=True, kw_only=True):
    """Prompts to continue or to answer."""

    chat: Annotated[
        bool, Meta(description="each prompt is a message to answer, not a text to continue")
    ] = False
    system: Annotated[
        str, Meta(description="what the model is told before each message (with --chat)")
    ] = ""
    json: Annotated[bool, Meta(description="a JSON object a line for each prompt, once done")] = (
        False
    )
