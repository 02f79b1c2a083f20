"""What `LLM.beam_search` takes and returns, in the shape that vLLM gives it.

Owns the shapes and how completions become them. It must not know the engine. Invariant: as many
sequences as the beam is wide (fewer if there are no more), the best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidRequestError
from ..protocol import MAX_LOGPROBS, SamplingParams
from .request_output import CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """How to search. Names and defaults are vLLM's."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # nothing is sampled: 0 or 1
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # changes nothing: tokens have it, text has not

    def sampling_params(self) -> SamplingParams:
        """The same for `LLM.generate`. InvalidRequestError names the field at fault."""
        try:
            params = SamplingParams(
                n=self.beam_width,
                use_beam_search=True,
                max_tokens=self.max_tokens,
                ignore_eos=self.ignore_eos,
                temperature=self.temperature,
                length_penalty=self.length_penalty,
            )
            return params.clone(logprobs=min(2 * params.n, MAX_LOGPROBS))
        except InvalidRequestError as error:
            if error.param == "n":
                message = "beam_width" + error.message.removeprefix("n")
                raise InvalidRequestError(message, param="beam_width") from None
            raise


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One answer, the prompt before it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # one for each token of the answer
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None
    multi_modal_data: None = None
    mm_processor_kwargs: None = None


class BeamSearchOutput(msgspec.Struct):
    """The answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Of a request with `use_beam_search`."""
    return BeamSearchOutput(
        [_sequence(output.prompt_token_ids, one, tokenizer) for one in output.outputs]
    )


def _sequence(
    prompt_token_ids: Sequence[int], output: CompletionOutput, tokenizer: Tokenizer
) -> BeamSearchSequence:
    tokens = [*prompt_token_ids, *output.token_ids]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=output.logprobs or [],
        cum_logprob=output.cumulative_logprob or 0.0,
        text=tokenizer.decode(tokens, skip_special_tokens=False),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
