"""What is asked: prompts of a length, a shared beginning, an output length.

Prompts are random and new in each round, so that no round finds another's in a prefix cache; the
same seed gives the same prompts, so that servers can be compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Short and common, so that most are one token in any vocabulary: a prompt of text has about as many
# tokens as words. What it really had is in the figures.
_WORDS = (
    "the of and to in is it that for on with as was at by an be this from or have not are but"
    " they one all there when out up your can said so if do will each about how other into has"
    " more her two like him see time could no make than first been its who now people my made"
    " over did down only way find use may water long little very after called just where most"
    " know get through back much before go good new write our used me man too any day same right"
    " look think also around another came come work three word must because does part even place"
).split()


@dataclass(frozen=True)
class Workload:
    input_len: int
    output_len: int
    shared_len: int = 0  # of the input: the same for all requests of a round

    def token_prompts(self, count: int, seed: str, vocab_size: int) -> list[list[int]]:
        """Prompts of exact length. The first ids of a vocabulary, often special, are left out."""
        source = random.Random(seed)

        def ids(length: int) -> list[int]:
            return [source.randrange(vocab_size // 20, vocab_size) for _ in range(length)]

        shared = ids(self.shared_len)
        return [shared + ids(self.input_len - self.shared_len) for _ in range(count)]

    def text_prompts(self, count: int, seed: str) -> list[str]:
        """Prompts of as many words; a chat template adds its own tokens."""
        source = random.Random(seed)

        def words(length: int) -> list[str]:
            return source.choices(_WORDS, k=length)

        shared = words(self.shared_len)
        return [" ".join(shared + words(self.input_len - self.shared_len)) for _ in range(count)]
