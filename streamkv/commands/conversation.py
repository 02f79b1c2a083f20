"""A conversation with a model, as far as its context can hold it.

Owns what was said and which turns are forgotten. Knows neither terminals nor how text is made.
Invariant: turns are whole, a message and its answer; what `prompt` gives has room for an answer.
"""

from __future__ import annotations

from typing import NamedTuple

from ..engine.admission import check_prompt_len
from ..engine.async_engine import AsyncEngine
from ..errors import ContextLengthError

ANSWER_SHARE = 4  # of the context, that part at most is kept free for an answer


class Turn(NamedTuple):
    message: str
    answer: str


class Prompt(NamedTuple):
    token_ids: list[int]
    num_forgotten: int  # turns dropped for it


class Conversation:
    """What was said so far."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Turn] = []

    def clear(self) -> None:
        self._turns.clear()

    def add(self, message: str, answer: str) -> None:
        self._turns.append(Turn(message, answer))

    def take_last(self) -> Turn | None:
        """The last turn, as if it had not been; None if there was none."""
        return self._turns.pop() if self._turns else None

    async def prompt(self, engine: AsyncEngine, message: str, room: int | None) -> Prompt:
        """The tokens to answer `message` after, with `room` tokens left for that (None: some).

        Oldest turns are forgotten as needed, then at once so many that half of the context is
        free: the turns that follow find their beginning in the prefix cache. ContextLengthError
        if the message is too long even alone, InvalidRequestError if the model's template refuses
        it; nothing is forgotten then.
        """
        context = engine.info.max_model_len
        limit = context - min(room or context // ANSWER_SHARE, context // 2)
        for num_forgotten in range(len(self._turns) + 1):
            is_alone = num_forgotten == len(self._turns)
            try:
                token_ids = await engine.encode_chat(self._messages(num_forgotten, message))
            except ContextLengthError:
                if is_alone:
                    raise
            else:
                if is_alone or len(token_ids) <= limit:
                    break
            limit = context // 2
        what = "message and system text" if self.system else "message"
        check_prompt_len(len(token_ids), engine.info, what)
        del self._turns[:num_forgotten]
        return Prompt(token_ids, num_forgotten)

    def _messages(self, num_forgotten: int, message: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self._turns[num_forgotten:]:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": message}]
