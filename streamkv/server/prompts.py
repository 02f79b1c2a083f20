"""The prompts of one completions request: text, token ids, or lists of either.

Owns how many there may be, when they are tokenized before they are admitted, and what of them is
echoed. Knows nothing of sampling. Invariant: nothing of a prompt is looked at item by item before
its length was found to be allowed.

An empty text stands for the beginning of a document: the token that the model's tokenizer puts
there; where it puts none, there is nothing to continue, which is a 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

from ..engine.admission import check_prompt_len
from ..engine.async_engine import AsyncEngine
from ..engine.encoding import decode_whole
from ..errors import InvalidRequestError
from .prompt_echo import EchoedPrompt

MAX_PROMPTS = 1024
MAX_PROMPTS_TIMES_N = 4096  # choices of one request

GivenPrompt: TypeAlias = str | list[int]


class Prompt(NamedTuple):
    content: GivenPrompt  # what the engine gets
    echo: EchoedPrompt


def read_prompts(
    given: str | Sequence[object], max_model_len: int, *, name: str, num_each: int
) -> list[GivenPrompt]:
    """The prompts, one or many, each with `num_each` choices, as the field `name` says.
    InvalidRequestError for none, too many or a mixture.

    Of more items than are allowed only the first are looked at: token ids will be refused for
    their number when the request is admitted.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError("prompt: expected text or token ids, got []", param="prompt")
    kinds = set(map(type, given[: max(MAX_PROMPTS, max_model_len)]))
    if kinds == {int}:
        return [cast("list[int]", given)]
    if len(kinds) > 1:
        raise InvalidRequestError(
            "prompt: expected a string, a list of strings, a list of token ids or a list of lists "
            "of token ids, got a mixture",
            param="prompt",
        )
    if len(given) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt: expected at most {MAX_PROMPTS} prompts, got {len(given)}", param="prompt"
        )
    if len(given) * num_each > MAX_PROMPTS_TIMES_N:
        raise InvalidRequestError(
            f"{name}: expected at most {MAX_PROMPTS_TIMES_N} choices in a request, got {num_each} "
            f"for each of {len(given)} prompts; send fewer prompts or lower {name}",
            param=name,
        )
    return cast("list[GivenPrompt]", given)


class PromptEncoder:
    """Makes one request's prompts what the engine gets and the answer begins with."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        add_special_tokens: bool,
        echo: bool,
        keep: int | None,
        needs_ids: bool,
    ) -> None:
        """`keep`: so many tokens at the end are left of a longer prompt. `needs_ids`: its number of
        tokens is to be known."""
        self._engine = engine
        self._add_special_tokens = add_special_tokens
        self._echo = echo
        self._keep = keep
        self._needs_ids = needs_ids or not add_special_tokens or (echo and keep is not None)

    async def encode(self, given: GivenPrompt) -> Prompt:
        """One prompt; as text it is left as it is where that will do."""
        if not isinstance(given, str):
            return await self._with_ids(given, None)
        if given and not self._needs_ids:
            return Prompt(given, EchoedPrompt(given, True) if self._echo else EchoedPrompt())
        token_ids = await self._engine.encode(
            given, add_special_tokens=self._add_special_tokens, must_fit=self._keep is None
        )
        if not token_ids:
            raise InvalidRequestError(
                "prompt: expected at least one token, got none, and this model's tokenizer begins "
                "a text with none of its own; send some text",
                param="prompt",
            )
        return await self._with_ids(token_ids, given)

    async def _with_ids(self, token_ids: list[int], text: str | None) -> Prompt:
        if not self._echo:
            return Prompt(token_ids, EchoedPrompt())
        if self._keep is not None:
            token_ids, text = token_ids[-self._keep :], None
        if text is not None:
            return Prompt(token_ids, EchoedPrompt(text, True))
        check_prompt_len(len(token_ids), self._engine.info)
        return Prompt(
            token_ids, EchoedPrompt(await decode_whole(self._engine.tokenizer, token_ids))
        )
