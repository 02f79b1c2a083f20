"""LLM: a language model for programs that have prompts and want answers, in vLLM's manner.

    from streamkv import LLM, SamplingParams

    with LLM("smollm2-135m-instruct") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

Owns how prompts become a batch, how the batch is fed to the engine, and the progress bar. It must
not know the scheduler or the device. The engine runs on a thread of its own (`background.py`), so
this works in scripts, in threads, several at once, and beside a running event loop.

Invariant: nothing runs before everything was checked; results come in the order of the prompts; a
call that is left, by Ctrl-C or another error, has ended its requests, and the LLM can be used on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .. import vllm_options
from ..config import EngineConfig
from ..errors import EngineDeadError, InvalidRequestError
from ..fields import by_all_names
from ..plain import plain
from ..protocol import RunnerInfo, SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .admission import num_kept_tokens
from .async_engine import AsyncEngine
from .background import BackgroundEngine
from .batch import CLOSED, Answer, Job, check_batch, run_batch
from .beam_output import BeamSearchOutput, BeamSearchParams, beam_search_output
from .llm_prompts import Asked, Prompt, read_chat, read_prompt, split_chats, split_prompts
from .loading import resolve_config
from .progress_bar import ProgressBar
from .request_output import RequestOutput, completion_output, failed_output, prompt_logprobs
from .vllm_calls import check_arguments, no_attribute

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Whoever forgets an LLM waits so long at most for its end: it may hold a lock that the end needs.
FORGOTTEN_TIMEOUT_S = 10.0

Item = TypeVar("Item")
_FIELDS = by_all_names(EngineConfig)


class LLM:
    """A model to generate text with, loaded when this is made.

    `options` are fields of EngineConfig, and vLLM's options where they change nothing; None is the
    default. `seed` draws the seeds of prompts that have none, in their order; None: others at each
    start. Close it (or leave its context) to free the model; that also happens when nobody refers
    to it any more, and when the program ends. Methods may be called in any thread.
    """

    def __init__(self, model: str, *, seed: int | None = 0, **options: Any) -> None:
        """Load the model. ConfigError, ModelLoadError."""
        given = {name: value for name, value in options.items() if value is not None}
        fields = {_FIELDS[name].name: given.pop(name) for name in [*given] if name in _FIELDS}
        vllm_options.check(given)
        fields |= {"model": str(model), "seed": -1 if seed is None else seed}
        config = resolve_config(None, fields)
        self._load(lambda: AsyncEngine(config))

    @classmethod
    def from_engine(cls, build: Callable[[], AsyncEngine]) -> Self:
        """An LLM of the engine that `build` makes, on the thread on which it will live."""
        llm = cls.__new__(cls)
        llm._load(build)
        return llm

    def _load(self, build: Callable[[], AsyncEngine]) -> None:
        self._background = BackgroundEngine(build)
        self._numbers = itertools.count()
        self._forgotten = weakref.finalize(self, self._background.close, FORGOTTEN_TIMEOUT_S)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        prompt_token_ids: Any = None,
        priority: int | Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The answers to one prompt or several, in order.

        A prompt is text, token ids, or a dict with `prompt` or `prompt_token_ids` (and `cache_salt`
        if it likes); arrays will do. `prompt_token_ids` may be given instead of `prompts`, as older
        scripts do. `sampling_params`: for all, or a list with one for each; None: the
        checkpoint's (`get_default_sampling_params`). `priority`: lower runs first. `use_tqdm`:
        whether there is a progress bar, or what makes one. `others`: vLLM's arguments for what is
        not done here, as long as they ask for nothing.

        InvalidRequestError and ContextLengthError name the prompt at fault, before anything runs.
        A prompt at which the device fails has an empty output with finish_reason "error".
        """
        check_arguments({"lora_request": lora_request, **others})
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidRequestError(
                    "prompt_token_ids: expected no prompts beside it; give token ids alone",
                    param="prompt_token_ids",
                )
            prompts = prompt_token_ids
        return self._run(split_prompts(prompts), read_prompt, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation (a list of messages) or several, in order.

        `chat_template` is Jinja to use instead of the model's. With `continue_final_message`, and
        `add_generation_prompt` off, the answer goes on where the last message ends. Errors are
        those of `generate`; the output's `prompt` is what the template made.
        """
        content_format = {"chat_template_content_format": chat_template_content_format}
        check_arguments({"lora_request": lora_request, **content_format, **others})
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message: expected add_generation_prompt=False beside it: the last "
                "message can't both be continued and be followed by another"
            )
        template = None
        if chat_template is not None:
            template = ChatTemplate(chat_template, self.tokenizer.special_tokens)
        read = functools.partial(
            read_chat,
            chat_template=template,
            continue_final_message=continue_final_message,
            variables={
                **(chat_template_kwargs or {}),
                "add_generation_prompt": add_generation_prompt,
                **({} if tools is None else {"tools": tools}),
            },
        )
        return self._run(split_chats(messages), read, sampling_params, use_tqdm, None)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely answers to one prompt or several, in order, best first.

        Prompts and errors are those of `generate`; with `SamplingParams(use_beam_search=True)` that
        does the same. `concurrency_limit` changes nothing: as many prompts run as fit.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(
                f"params: expected BeamSearchParams, got {type(params).__name__}", param="params"
            )
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm, lora_request, **others)
        return [beam_search_output(output, self.tokenizer) for output in outputs]

    @property
    def info(self) -> RunnerInfo:
        """Facts and plan of the loaded model."""
        return self._background.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._background.engine.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's, as transformers has it; the same one each time."""
        return self._their_tokenizer

    @functools.cached_property
    def _their_tokenizer(self) -> PreTrainedTokenizerFast:
        return self.tokenizer.to_transformers(self.info.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint recommends, to use or to change."""
        return SamplingParams(**self._background.engine.sampling_defaults)

    def close(self) -> None:
        """Free the model. Calls that run in other threads end with EngineDeadError. Idempotent."""
        self._background.close()
        self._forgotten.detach()

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- a batch -----------------------------------------------------------------------------

    def _run(
        self,
        asked: Sequence[Asked],
        read: Callable[[Asked, Tokenizer, RunnerInfo, int | None], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        samplings = _one_for_each(
            "sampling_params",
            self.get_default_sampling_params() if sampling_params is None else sampling_params,
            SamplingParams,
            len(asked),
        )
        priorities = _one_for_each("priority", 0 if priority is None else priority, int, len(asked))
        if not asked:
            return []
        background, info = self._background, self.info
        unchecked = [
            Job(
                str(next(self._numbers)),
                read(one, self.tokenizer, info, num_kept_tokens(sampling, info)),
                sampling,
                number,
            )
            for one, sampling, number in zip(asked, samplings, priorities, strict=True)
        ]
        jobs = background.call(check_batch(background.engine, unchecked)).result()
        with ProgressBar(use_tqdm, len(jobs)) as bar:
            outputs = self._outputs(jobs, bar)
        failed = [(job, output) for job, output in zip(jobs, outputs, strict=True) if output.error]
        if failed:
            (job, output), *_ = failed
            logger.warning(
                "%d of %d prompts failed, and their outputs are empty; %s: %s",
                *(len(failed), len(jobs), job.prompt.name, output.error),
            )
        return outputs

    def _outputs(self, jobs: Sequence[Job], bar: ProgressBar) -> list[RequestOutput]:
        """Run the jobs. Whatever ends this early, Ctrl-C too, ends them."""
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None: there are no more
        outputs: dict[str, RequestOutput] = {}
        batch = self._background.call(run_batch(self._background.engine, jobs, answers.put))
        try:
            batch.add_done_callback(lambda _: answers.put(None))
            while (answer := answers.get()) is not None:
                output = outputs[answer.job.request_id] = _output(answer)
                bar.update(output)
            batch.result()
        except BaseException as exc:
            batch.cancel()
            if isinstance(exc, CancelledError):  # with the loop: the engine was closed
                raise EngineDeadError(CLOSED) from None
            raise
        return [outputs[job.request_id] for job in jobs]


def _output(answer: Answer) -> RequestOutput:
    """In the caller's thread: with log-probabilities it is much to do."""
    job = answer.job
    has_logprobs = job.sampling.logprobs is not None
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.prompt.text,
        prompt_token_ids=list(job.prompt.token_ids),
        prompt_logprobs=prompt_logprobs(answer.prompt_logprobs()),
        outputs=[
            completion_output(completion, has_logprobs=has_logprobs)
            for completion in answer.completions
        ]
        or [failed_output(index) for index in range(job.sampling.n)],
        metrics=answer.metrics,
        num_cached_tokens=answer.num_cached_tokens,
        error=answer.error,
    )


def _one_for_each(name: str, given: Any, item_type: type[Item], num: int) -> list[Item]:
    """The items of a list with one for each prompt, or the same one for all."""
    given = plain(given)
    if isinstance(given, item_type):
        return [given] * num
    items = list(map(plain, given)) if isinstance(given, Sequence) else [given]
    if any(not isinstance(item, item_type) for item in items):
        raise InvalidRequestError(
            f"{name}: expected {item_type.__name__} or a list of those, got {given!r:.100}",
            param=name,
        )
    if len(items) != num:
        raise InvalidRequestError(
            f"{name}: expected one for each of the {num} prompts, got {len(items)}", param=name
        )
    return items
