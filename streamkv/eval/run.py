"""`streamkv eval`: runs the ways one after another, and prints what each costs.

Owns the order (the reference first, one model in memory at a time) and the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..bench.report import aligned, machine, rounded
from ..config import EngineConfig
from ..engine.loading import read_tokenizer
from ..errors import ConfigError
from ..models import ModelConfig
from ..weights.hub import Checkpoint, resolve_checkpoint
from ..weights.loader import open_checkpoint
from .native import NativeModel, sized
from .options import EvalConfig
from .oracle import Oracle
from .score import Predictions, Score, log_probs
from .text import EvalText, Window, read_text
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

    def __init__(self, text: EvalText, context: int, greedy_tokens: int) -> None:
        self._text = text
        self._context = context
        self._greedy_tokens = greedy_tokens
        self._reference: Predictions | None = None
        self.rows: dict[Way, Row] = {}

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def run(
        self, config: EngineConfig, *, is_reference: bool = False, transformers: bool = False
    ) -> None:
        """Load a model and score it, unless the same was scored before."""
        checkpoint = resolve_checkpoint(config.model)
        sized_config = sized(config, self._context, self._greedy_tokens)
        model = NativeModel(sized_config, checkpoint)
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
        score = self._score(model, way, kept)
        self.rows[way] = Row(way, num_bytes, score)
        if is_reference:
            self._reference = kept

    def _score(self, model: Computes, way: Way, kept: Predictions | None) -> Score:
        score = Score()
        windows = tqdm(
            self._text.windows(self._context),
            f"{way.by}, {way.weights}, {way.inputs}, {way.kv} KV",
            self._text.num_windows(self._context),
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
        if self._greedy_tokens:
            score.continuations = model.continuations(self._text.prompts(), self._greedy_tokens)
        return score


def oracle_of(model: NativeModel, checkpoint: Checkpoint) -> Oracle:
    """transformers on the weights of `model`, which must outlive this call only."""
    source = open_checkpoint(checkpoint)
    try:
        config = source.config
    finally:
        source.close()
    loaded = model.loaded
    parameters = list(loaded.model.parameters())
    return Oracle(config, parameters, loaded.weights, loaded.team.num_threads)


def print_eval(engine_config: EngineConfig, options: EvalConfig, given: Container[str] = ()) -> int:
    """Score every way, print the table, and the document if it was asked for. Returns the exit
    code. A context that wasn't `given` fits itself to the model's."""
    checkpoint = resolve_checkpoint(engine_config.model)
    text = read_text(options.text, read_tokenizer(checkpoint), options.max_tokens)
    context = options.context
    if "context" not in given:
        context = min(context, _longest_context(checkpoint))
    reference = reference_of(engine_config, options)
    ways = ways_of(engine_config, options)
    others = {*options.also, *([reference.model] if reference else [])} - {engine_config.model}
    for model in sorted(others):
        _check_tokens(text, model, options)
    evaluation = Evaluation(text, context, options.greedy_tokens)
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


def _longest_context(checkpoint: Checkpoint) -> int:
    source = open_checkpoint(checkpoint)
    try:
        return ModelConfig.from_dict(source.config).max_position_embeddings
    finally:
        source.close()


def _check_tokens(text: EvalText, model: str, options: EvalConfig) -> None:
    """ConfigError for a model that cuts the text into other tokens."""
    tokenizer = read_tokenizer(resolve_checkpoint(model))
    if read_text(options.text, tokenizer, options.max_tokens) != text:
        raise ConfigError(
            f"{model}: expected a model with the same tokens as the first, got another tokenizer; "
            "figures of predictions compare only token by token"
        )


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
                **row.score.figures(reference),
            }
            for row in rows
        ],
        "left_out": list(refused),
    }
