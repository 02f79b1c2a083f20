"""`streamkv eval`: runs the ways one after another, and prints what each costs.

Owns the order (the reference first, one model in memory at a time) and the table.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..bench.report import aligned, machine, rounded
from ..config import EngineConfig
from ..engine.loading import read_tokenizer
from ..errors import ConfigError, StreamkvError
from ..models import read_config
from ..weights.hub import Checkpoint, checkpoint_of, resolve_checkpoint
from ..weights.loader import opened_checkpoint
from .native import NativeModel, sized
from .options import EvalConfig
from .oracle import Oracle
from .score import NotFinite, Predictions, Score, log_probs
from .text import PROMPT_LEN, Characters, EvalText, Lengths, Window, read_characters
from .ways import reference_of, ways_of

HEAD = ("model", "weights", "inputs", "KV", "MiB", "perplexity", "ratio", "KL", "top-1", "greedy")
LEGEND = """\
ratio: of perplexities. KL: nats a token more than the reference needs. top-1: the same token is the
likeliest. greedy: tokens of greedy continuations before the first difference."""


class Computes(Protocol):
    """A model that can be scored."""

    def predictions(self, window: Window) -> Iterator[NDArray[np.float32]]: ...

    def continuations(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> NDArray[np.int32]: ...


class Way(NamedTuple):
    """What was run, by what it is and not by how it was asked for."""

    model: str
    weights: str  # "Q4_1 + Q8_0"
    inputs: str  # "int8"
    kv: str
    by: str = "streamkv"


class Row(NamedTuple):
    """One way, scored."""

    way: Way
    weight_bytes: int
    score: Score


class Evaluation:
    """Scores one model after another on one text, the reference first if there is one."""

    def __init__(self, text: EvalText, lengths: Lengths) -> None:
        self._text = text
        self._lengths = lengths
        self._reference: Predictions | None = None
        self.rows: dict[Way, Row] = {}

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def run(
        self, config: EngineConfig, *, is_reference: bool = False, transformers: bool = False
    ) -> None:
        """Load a model and score it, unless the same was scored before."""
        checkpoint = checkpoint_of(config)
        model = NativeModel(sized(config, self._lengths), checkpoint)
        try:
            formats = model.loaded.formats
            way = Way(config.model, formats.weights, formats.inputs, formats.kv_dtype)
            num_bytes = sum(matrix.num_bytes for matrix in formats.matrices.values())
            self._run(model, way, num_bytes, is_reference=is_reference)
            if transformers:
                by = way._replace(inputs="float32", kv="float32", by="transformers")
                if by not in self.rows:
                    self._run(oracle_of(model, checkpoint), by, num_bytes)
        finally:
            model.close()

    def _run(
        self, model: Computes, way: Way, num_bytes: int, *, is_reference: bool = False
    ) -> None:
        if way in self.rows:
            return
        kept = Predictions() if is_reference else None
        try:
            score = self._score(model, way, kept)
        except NotFinite as error:
            raise StreamkvError(
                f"{way.model} ({way.weights}, {way.inputs} inputs, {way.kv} KV in {way.by}): "
                f"expected finite logits for every token of the text, got NaN or infinity; if "
                "--quantization none --dtype float32 gives the same, the checkpoint is broken: get "
                "it again"
            ) from error
        self.rows[way] = Row(way, num_bytes, score)
        if is_reference:
            self._reference = kept

    def _score(self, model: Computes, way: Way, kept: Predictions | None) -> Score:
        score = Score()
        windows = tqdm(
            self._text.windows(self._lengths.context),
            f"{way.by}, {way.weights}, {way.inputs}, {way.kv} KV",
            self._text.num_windows(self._lengths.context),
            disable=None,  # where nobody watches
            leave=False,
        )
        for window in windows:
            first = window.first_scored
            for logits in model.predictions(window):
                values = log_probs(logits)
                token_ids = window.token_ids[first : first + len(values)]
                first += len(values)
                score.add(values, token_ids, self._reference)
                if kept is not None:
                    kept.append(values)
        if self._lengths.greedy:
            prompts = self._text.prompts(self._lengths.prompt)
            score.continuations = model.continuations(prompts, self._lengths.greedy)
        return score


def oracle_of(model: NativeModel, checkpoint: Checkpoint) -> Oracle:
    """transformers on the weights of `model`, which must outlive this call only."""
    with opened_checkpoint(checkpoint) as source:
        config = source.config
    loaded = model.loaded
    parameters = list(loaded.model.parameters())
    return Oracle(config, parameters, loaded.weights, loaded.team.num_threads)


def print_eval(engine_config: EngineConfig, options: EvalConfig, given: Container[str] = ()) -> int:
    """Score every way, print the table, and the document if it was asked for. Returns the exit
    code. Lengths that weren't `given` fit themselves to the models'."""
    reference = reference_of(engine_config, options)
    ways = ways_of(engine_config, options)
    characters = read_characters(options.text, options.max_tokens)
    names = [engine_config.model, *options.also, *([reference.model] if reference else [])]
    downloads = engine_config.download_dir
    texts = {name: _text_for(characters, name, downloads) for name in dict.fromkeys(names)}
    text, (_, vocab_size) = texts[engine_config.model]
    for name, (own, (_, own_vocab_size)) in texts.items():
        _check_tokens(name, own == text, own_vocab_size, vocab_size)
    longest = min((sizes.positions, name) for name, (_, sizes) in texts.items())
    lengths = _lengths(options, given, *longest)
    context = lengths.context
    evaluation = Evaluation(text, lengths)
    if reference is not None:
        evaluation.run(reference, is_reference=True)
    refused = []
    for config in ways:
        try:
            evaluation.run(config, transformers=options.transformers)
        except ConfigError as error:
            if not options.compare:
                raise
            refused.append(str(error))
    print_rows(evaluation, text, context, list(dict.fromkeys(refused)), as_json=options.json)
    return 0


class Sizes(NamedTuple):
    """What a checkpoint's config says of its tokens."""

    positions: int
    vocab_size: int


def _text_for(characters: Characters, model: str, download_dir: str) -> tuple[EvalText, Sizes]:
    """The text in a model's tokens. ConfigError for one that it has no embedding for."""
    checkpoint = resolve_checkpoint(model, download_dir=download_dir)
    with opened_checkpoint(checkpoint) as source:
        config = read_config(source.config)
    tokenizer = read_tokenizer(checkpoint)
    text = characters.tokens(tokenizer)
    greatest = max(text.token_ids)
    if greatest >= config.vocab_size:
        raise ConfigError(
            f"{model}: expected a tokenizer whose tokens are below the model's vocab_size, "
            f"{config.vocab_size}, got token {greatest} ({tokenizer.decode([greatest])!r}) in the "
            "text; the tokenizer and the weights don't belong together"
        )
    return text, Sizes(config.max_context_len, config.vocab_size)


def _check_tokens(model: str, is_same_text: bool, vocab_size: int, expected: int) -> None:
    """ConfigError for a model that cuts the text into other tokens, or knows more or fewer."""
    got = "another tokenizer" if not is_same_text else f"a vocab_size of {vocab_size}"
    if not is_same_text or vocab_size != expected:
        raise ConfigError(
            f"{model}: expected a model with the same tokens as the first, whose vocab_size is "
            f"{expected}, got {got}; figures of predictions compare only token by token"
        )


def _lengths(options: EvalConfig, given: Container[str], positions: int, model: str) -> Lengths:
    """What was asked for, or fits. ConfigError for what `model`, which has the fewest positions,
    doesn't allow."""
    context, greedy = options.context, options.greedy_tokens
    if "context" not in given:
        context = min(context, positions)
    if "greedy_tokens" not in given:
        greedy = min(greedy, positions // 2)
    if context > positions:
        raise ConfigError(
            f"--context: expected at most the {positions} positions of {model}, got {context}"
        )
    if greedy >= positions:
        raise ConfigError(
            f"--greedy-tokens: expected fewer than the {positions} positions of {model}, so that "
            f"a prompt has room, got {greedy}"
        )
    return Lengths(context, min(PROMPT_LEN, positions - greedy), greedy)


def print_rows(
    evaluation: Evaluation, text: EvalText, context: int, refused: Sequence[str], *, as_json: bool
) -> None:
    rows = list(evaluation.rows.values())
    reference = rows[0].score if evaluation.has_reference else None
    num_tokens = rows[0].score.num_tokens if rows else 0
    print(f"{num_tokens:,} tokens of {text.source}, in windows of {context:,}")
    if evaluation.has_reference:
        print("the first row is what the others are compared with")
    print()
    print(aligned([HEAD, *(_cells(row, reference) for row in rows)]))
    print()
    print(LEGEND)
    for reason in refused:
        print(f"left out: {reason}")
    if as_json:
        print(json.dumps(rounded(_document(rows, reference, text, context, refused))), flush=True)


def _cells(row: Row, reference: Score | None) -> list[str]:
    way, figures = row.way, row.score.figures(reference)

    def cell(name: str, form: str) -> str:
        return "" if figures[name] is None else format(figures[name], form)

    name = Path(way.model).name
    return [
        name if way.by == "streamkv" else f"{name} in {way.by}",
        way.weights,
        way.inputs,
        way.kv,
        f"{row.weight_bytes / 2**20:,.0f}",
        cell("perplexity", ",.4f"),
        cell("ratio", ".4f"),
        cell("kl_nats", "z.5f"),
        cell("same_top", ".1%"),
        cell("same_greedy", ".1%"),
    ]


def _document(
    rows: Sequence[Row],
    reference: Score | None,
    text: EvalText,
    context: int,
    refused: Sequence[str],
) -> dict[str, Any]:
    digest = hashlib.sha256(np.asarray(text.token_ids, np.int32).tobytes()).hexdigest()
    return {
        "machine": machine(),
        "text": {"source": text.source, "tokens": len(text.token_ids), "sha256": digest},
        "context": context,
        "has_reference": reference is not None,
        "rows": [
            {
                **row.way._asdict(),
                "weight_bytes": row.weight_bytes,
                "tokens": row.score.num_tokens,
                **_finite(row.score.figures(reference)),
            }
            for row in rows
        ],
        "left_out": list(refused),
    }


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: null."""
    return {
        name: None if one is not None and math.isinf(one) else one for name, one in figures.items()
    }
