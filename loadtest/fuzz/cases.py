"""A case: what one client does to the server, all of it from a seed and a number.

Owns how often each kind comes. Invariant: the same seed, number and server address give the same
case, whatever else is run.
"""

from __future__ import annotations

import random
from typing import NamedTuple, TypeAlias

from . import http_cases, socket_cases
from .http import Target
from .http_cases import Exchange, Leaving, Malformed
from .socket_cases import Broken, Departure, Handshake, Talk

Deed: TypeAlias = Exchange | Malformed | Leaving | Talk | Broken | Departure | Handshake

_KINDS = {
    "bodies": 450,
    "grammars": 30,
    "paths": 130,
    "lives": 30,
    "malformed": 80,
    "leaving": 60,
    "talk": 130,
    "broken": 50,
    "departure": 30,
    "lanes": 2,
    "handshake": 8,
}


class Case(NamedTuple):
    number: int
    kind: str
    deed: Deed


def make_case(seed: int, number: int, target: Target) -> Case:
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]
    request_id = f"fuzz-{seed}-{number}"
    match kind:
        case "bodies":
            deed: Deed = http_cases.bodies(rng, request_id)
        case "grammars":
            deed = http_cases.grammars(rng, request_id)
        case "paths":
            deed = http_cases.paths(rng, request_id)
        case "lives":
            deed = http_cases.lives(rng, request_id)
        case "malformed":
            deed = http_cases.malformed(rng, target)
        case "leaving":
            deed = http_cases.leaving(rng, request_id)
        case "talk":
            deed = socket_cases.talk(rng, request_id)
        case "broken":
            deed = socket_cases.broken(rng, request_id)
        case "departure":
            deed = socket_cases.departure(rng, request_id)
        case "lanes":
            deed = socket_cases.lanes(rng, request_id)
        case _:
            deed = socket_cases.handshake(rng, target)
    return Case(number, kind, deed)
