"""Ask a server for answers of every schema of a JSON-Schema-Test-Suite, and validate them.

    python -m loadtest.schemas --suite jsonschema-4.26.0/json
    python -m loadtest.schemas --suite … --draft draft7 --seeds 5 --only ref.json

The suite is a folder with tests/DRAFT/*.json, as in the source of the package jsonschema (which has
to be installed). Each schema is sent as a `response_format` at temperature 1, once for each seed.
What ended by "stop" has to be valid: one that isn't, or any status but 200 and 400, is said, and
makes the exit code 1. A schema may be refused; the reasons are counted, and how long they took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import COUNTED, add_model, add_server, folder, new_parser, positive
from .failures import named
from .fuzz.check import strict_json
from .fuzz.http import Answer, Ask, Gone, Offence, Target, hang_up, read_answer
from .stream import RequestFailed

DRAFTS = {  # and what a schema of it is marked with, if it isn't: drafts differ in what they mean
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
REMOTES = "http://localhost:1234/"  # where the suite's schemas say that the others are
_SHOWN = 20  # of each kind that has to be looked at


class Schema(NamedTuple):
    draft: str
    name: str  # file and place
    schema: Any


@dataclass
class Verdicts:
    """What became of all answers."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # why schemas were refused
    wrong: list[str] = field(default_factory=list)
    slowest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, what: str, schema: Schema, seconds: float, detail: str = "") -> None:
        self.counts[what] += 1
        self.slowest[what] = max(self.slowest.get(what, (0.0, "")), (seconds, schema.name))
        if what == "refused":
            self.reasons[detail] += 1
        elif what in ("invalid", "error"):
            shown = json.dumps(schema.schema)[:500]
            self.wrong.append(f"{what}: {schema.draft} {schema.name}: {detail}\n  schema: {shown}")


def read_suite(root: Path, draft: str, only: str) -> Iterator[Schema]:
    """All schemas of a draft. RequestFailed if there are none."""
    tests = root / "tests" / draft
    files = [path for path in sorted(tests.rglob("*.json")) if not only or only in path.name]
    if not files:
        raise RequestFailed(f"--suite: expected files {tests}/*{only or '.json'}, found none")
    for path in files:
        for number, group in enumerate(json.loads(path.read_text(encoding="utf-8"))):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            yield Schema(draft, f"{path.relative_to(tests)}#{number}", schema)


Validate = Callable[[Schema, Any], str]


def make_validator(root: Path) -> Validate:
    """What is wrong with an instance; empty: nothing. A schema that this library can't read is the
    library's trouble: ValueError."""
    import jsonschema
    import referencing
    from referencing.jsonschema import DRAFT7, DRAFT202012

    kinds = {
        "draft7": (jsonschema.Draft7Validator, DRAFT7),
        "draft2020-12": (jsonschema.Draft202012Validator, DRAFT202012),
    }
    remotes = root / "remotes"
    registries = {
        draft: referencing.Registry().with_resources(
            (REMOTES + path.relative_to(remotes).as_posix(), one)
            for path in remotes.rglob("*.json")
            for one in [kind[1].create_resource(json.loads(path.read_text(encoding="utf-8")))]
        )
        for draft, kind in kinds.items()
    }

    def validate(schema: Schema, instance: Any) -> str:
        validator = kinds[schema.draft][0](schema.schema, registry=registries[schema.draft])
        try:
            errors = [error.message for error in validator.iter_errors(instance)]
        except Exception as error:  # of a pattern or a reference, as the library raises them
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return "; ".join(errors)

    return validate


class Client:
    """One connection after another. `verdicts` gets what the answers were."""

    def __init__(
        self,
        target: Target,
        model: str | None,
        max_tokens: int,
        validate: Validate,
        verdicts: Verdicts,
    ) -> None:
        self._target = target
        self._model = model
        self._max_tokens = max_tokens
        self._validate = validate
        self._verdicts = verdicts

    async def ask(self, schema: Schema, seed: int) -> None:
        body = {
            "messages": [{"role": "user", "content": "Answer in JSON, in few words."}],
            "temperature": 1,
            "seed": seed,
            "max_tokens": self._max_tokens,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema.schema},
            },
        }
        if self._model:
            body["model"] = self._model
        started_s = time.monotonic()
        try:
            answer = await self._target.within(self._post(json.dumps(body).encode()))
        except (Offence, Gone) as error:
            answer = Answer(0, {}, str(error or "the connection was closed").encode())
        self._judge(schema, answer, time.monotonic() - started_s)

    async def _post(self, data: bytes) -> Answer:
        ask = Ask("POST", "/v1/chat/completions", data, (("Connection", "close"),))
        reader, writer = await self._target.connect()
        try:
            writer.write(ask.to_bytes(self._target))
            return await read_answer(reader, "POST")
        finally:
            await hang_up(writer)

    def _judge(self, schema: Schema, answer: Answer, seconds: float) -> None:
        text = answer.body.decode(errors="replace")
        if answer.status == 400:
            reason = json.loads(text)["error"]["message"]
            self._verdicts.add("refused", schema, seconds, reason[:160])
        elif answer.status != 200:
            self._verdicts.add("error", schema, seconds, f"{answer.status or 'no answer'}: {text}")
        else:
            choice = json.loads(text)["choices"][0]
            what, detail = self._verdict(schema, choice["message"]["content"], choice)
            self._verdicts.add(what, schema, seconds, detail)

    def _verdict(self, schema: Schema, content: str, choice: Any) -> tuple[str, str]:
        if choice["finish_reason"] != "stop":
            return choice["finish_reason"], ""
        try:
            instance = strict_json(content, "no JSON")
        except Offence as error:
            return "invalid", str(error)
        try:
            wrong = self._validate(schema, instance)
        except ValueError as error:
            return "not judged", str(error)
        return ("invalid", f"{content!r}: {wrong}") if wrong else ("valid", "")


async def ask_all(client: Client, schemas: Sequence[Schema], seeds: int, concurrency: int) -> None:
    waiting = [(schema, seed) for schema in schemas for seed in range(seeds)][::-1]

    async def worker() -> None:
        while waiting:
            await client.ask(*waiting.pop())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loadtest.schemas", __doc__)
    add = parser.add_argument
    add_server(parser)
    add("--suite", type=folder, required=True, metavar="FOLDER", help="has tests/DRAFT/*.json")
    add("--draft", choices=tuple(DRAFTS), nargs="+", default=tuple(DRAFTS))
    add("--only", default="", metavar="NAME", help="files whose name has this")
    add("--seeds", **COUNTED, default=3, help="answers of each schema (default: %(default)s)")
    add("--max-tokens", **COUNTED, default=64, help="of an answer (default: %(default)s)")
    add("--concurrency", **COUNTED, default=8)
    add("--deadline-s", type=positive, default=60.0, metavar="S", help="for one answer")
    add_model(parser)
    return parser


def report(verdicts: Verdicts) -> None:
    """For people."""
    for line in verdicts.wrong[:_SHOWN]:
        print(line)
    for reason, count in verdicts.reasons.most_common(_SHOWN):
        print(f"refused {count:5}: {reason}")
    for what, count in verdicts.counts.most_common():
        seconds, name = verdicts.slowest[what]
        print(f"{what:10} {count:6}   slowest {seconds:.3f} s, {name}")


def main() -> None:
    options = build_parser().parse_args()
    verdicts = Verdicts()
    target = Target(options.url, options.api_key, options.deadline_s)
    try:
        schemas = [
            schema
            for draft in options.draft
            for schema in read_suite(options.suite, draft, options.only)
        ]
        validate = make_validator(options.suite)
        client = Client(target, options.model, options.max_tokens, validate, verdicts)
        with named(options.url):
            asyncio.run(ask_all(client, schemas, options.seeds, options.concurrency))
    except RequestFailed as error:
        sys.exit(f"loadtest: {error}")
    except ImportError as error:
        sys.exit(f"loadtest: {error}; pip install jsonschema")
    report(verdicts)
    document = {
        "schemas": len(schemas),
        "counts": dict(verdicts.counts),
        "reasons": dict(verdicts.reasons),
        "wrong": verdicts.wrong,
        "slowest_s": {what: seconds for what, (seconds, _) in verdicts.slowest.items()},
    }
    print(json.dumps(document))
    sys.exit(1 if verdicts.wrong else 0)


if __name__ == "__main__":
    main()
