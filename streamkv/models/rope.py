"""Rotary positions: what scaling a checkpoint asks for, its frequencies, and the table of angles.

Owns the arithmetic from config to cosines, in float32 where the training code has float32: a more
exact angle would turn far positions differently from what the models learnt. Computes with numpy;
knows nothing of layers or devices. Invariant: frequencies and tables are transformers' numbers,
and a scaling that depends on the length of the sequence is refused, for a row's answer mustn't
change with what comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from ..ops import Rope
from .config_values import read_number, read_size, read_switch, unexpected

Floats = NDArray[np.float32]

DEFAULT_THETA = 10000.0
# Keys that scale, of one kind or another, and those that stand beside them. As in transformers a
# kind leaves the others' keys unread; plain embeddings that have some are a mistake, though.
SCALING_KEYS = (
    *("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
OTHER_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings", "truncate", "finetuned"),
)
TABLE_CHUNK = 4096  # positions whose angles are in float64 at once


class NoScaling(msgspec.Struct, frozen=True, tag="default"):
    """Plain rotary embedding (Su et al., 2021)."""


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Positions are divided by a factor."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1's: slow pairs are divided by a factor, fast ones not, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al., 2023): a ramp between dividing and not, and warmer attention."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    truncate: bool  # the ramp begins and ends at whole pairs


class PairScaling(msgspec.Struct, frozen=True, tag="longrope"):
    """Each pair has a factor of its own: LongRoPE whose long and short factors are the same."""

    factors: tuple[float, ...]
    attention_factor: float


RopeScaling = NoScaling | LinearScaling | Llama3Scaling | YarnScaling | PairScaling


class RopeConfig(msgspec.Struct, frozen=True):
    """What a config.json says about rotary positions."""

    theta: float
    scaling: RopeScaling


def read_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    Older and newer keys may stand side by side; then they must say the same.
    """
    theta = read_number(config, "rope_theta", default=DEFAULT_THETA)
    found: list[RopeConfig] = []
    for key in ("rope_scaling", "rope_parameters"):
        values = config.get(key)
        if values is not None and not isinstance(values, Mapping):
            raise unexpected(key, "an object or null", values)
        if values:
            own_theta = read_number(values, "rope_theta", default=theta)
            found.append(RopeConfig(own_theta, _read_scaling(key, values, config, max_positions)))
    if len(found) == 2 and found[0] != found[1]:
        raise ModelLoadError(
            f"model config: rope_scaling and rope_parameters disagree ({found[0]} and {found[1]}); "
            "remove one of them"
        )
    return found[0] if found else RopeConfig(theta, NoScaling())


def _read_scaling(
    key: str, values: Mapping[str, Any], config: Mapping[str, Any], max_positions: int
) -> RopeScaling:
    _check_keys(key, values)
    kind = values.get("rope_type", values.get("type", "default"))
    if "type" in values and values["type"] != kind:
        raise unexpected(f"{key}.type", f"{kind!r:.100} like rope_type", values["type"])
    if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise unexpected("partial_rotary_factor", "1.0", values["partial_rotary_factor"])
    if kind == "default":
        for name in SCALING_KEYS:
            if values.get(name) not in (None, 1):
                raise unexpected(
                    f"{key}.{name}", "absent where rope_type names no scaling", values[name]
                )
        return NoScaling()
    if kind == "linear":
        return LinearScaling(read_number(values, "factor", least=1.0))
    if kind not in ("llama3", "yarn", "longrope"):
        raise ModelLoadError(
            f"model config: {key} asks for {kind!r:.100} rotary embeddings; supported are "
            "default, linear, llama3, yarn, and longrope with equal long and short factors"
        )
    # The one beside the rope's parameters wins, as in transformers.
    original = read_size(values, "original_max_position_embeddings", default=max_positions)
    original = read_size(config, "original_max_position_embeddings", default=original)
    if kind == "llama3":
        return _read_llama3(values, original)
    if kind == "yarn":
        return _read_yarn(values, original, max_positions)
    return _read_longrope(values, original, max_positions)


def _check_keys(key: str, values: Mapping[str, Any]) -> None:
    """ModelLoadError for what nobody knows: a key that was misspelled, or a kind of layers that
    has embeddings of its own."""
    for name in values:
        if name not in (*SCALING_KEYS, *OTHER_KEYS) and values[name] is not None:
            raise ModelLoadError(
                f"model config: {key}.{name!s:.100} is not supported: it isn't known how it scales "
                "rotary embeddings; mend the name, or remove it if it changes nothing"
            )


def _read_llama3(values: Mapping[str, Any], original: int) -> Llama3Scaling:
    low = read_number(values, "low_freq_factor")
    high = read_number(values, "high_freq_factor")
    if high <= low:
        raise unexpected("high_freq_factor", f"more than low_freq_factor {low}", high)
    return Llama3Scaling(read_number(values, "factor", least=1.0), low, high, original)


def _read_yarn(values: Mapping[str, Any], original: int, max_positions: int) -> YarnScaling:
    factor = read_number(values, "factor", default=max(1.0, max_positions / original), least=1.0)
    if values.get("attention_factor") is not None:
        attention_factor = read_number(values, "attention_factor")
    elif values.get("mscale") and values.get("mscale_all_dim"):
        attention_factor = _warmth(factor, read_number(values, "mscale"))
        attention_factor /= _warmth(factor, read_number(values, "mscale_all_dim"))
    else:
        attention_factor = _warmth(factor, 1.0)
    fast = read_number(values, "beta_fast", default=32.0)
    slow = read_number(values, "beta_slow", default=1.0)
    if fast < slow:
        raise unexpected("beta_fast", f"at least beta_slow {slow}", fast)
    truncate = read_switch(values, "truncate", default=True)
    return YarnScaling(factor, attention_factor, fast, slow, original, truncate)


def _warmth(factor: float, mscale: float) -> float:
    """YaRN's factor for cosines and sines, so that attention stays as sharp over more tokens."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(values: Mapping[str, Any], original: int, max_positions: int) -> PairScaling:
    """Long factors count for a sequence longer than the original context; ours don't change."""
    short = values.get("short_factor")
    if not isinstance(short, list) or values.get("long_factor") != short:
        raise ModelLoadError(
            "model config: longrope is supported if short_factor and long_factor are the same "
            "list: rotary embeddings that change with the length of a sequence are not"
        )
    factors = tuple(read_number({"short_factor": value}, "short_factor") for value in short)
    factor = read_number(values, "factor", default=max_positions / original)
    default = 1.0
    if factor > 1 and original > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    return PairScaling(factors, read_number(values, "attention_factor", default=default))


def build_rope(config: RopeConfig, head_dim: int, max_positions: int) -> Rope:
    """The frequencies of the pairs of a head. ModelLoadError if the numbers make none."""
    scaling, magnitude = config.scaling, 1.0
    # Powers in float64, each rounded once: a float32 one differs between libraries.
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    periods = (float(np.float32(config.theta)) ** exponents.astype(np.float64)).astype(np.float32)
    match scaling:
        case NoScaling():
            frequencies = np.float32(1) / periods
        case LinearScaling(factor=factor):
            frequencies = np.float32(1) / periods / np.float32(factor)
        case Llama3Scaling():
            frequencies = _llama3_frequencies(np.float32(1) / periods, scaling)
        case YarnScaling(attention_factor=magnitude):
            frequencies = _yarn_frequencies(periods, scaling, config.theta)
        case PairScaling(factors=factors, attention_factor=magnitude):
            if len(factors) != len(periods):
                raise unexpected("short_factor", f"a list of {len(periods)} numbers", len(factors))
            frequencies = np.float32(1) / (np.array(factors, np.float32) * periods)
    if not (np.isfinite(frequencies).all() and frequencies.min() > 0):
        raise ModelLoadError(
            f"model config: rope_theta {config.theta} with {scaling} gives rotary frequencies "
            f"from {frequencies.min()} to {frequencies.max()}; expected positive numbers"
        )
    return Rope(tuple(frequencies.tolist()), magnitude, max_positions)


def _llama3_frequencies(plain: Floats, scaling: Llama3Scaling) -> Floats:
    """Pairs with long wavelengths are divided by the factor, short ones not."""
    original, low, high = (
        scaling.original_max_positions,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    divided = plain / np.float32(scaling.factor)
    blended = (1 - smooth) * plain / np.float32(scaling.factor) + smooth * plain
    is_long = wavelengths > np.float32(original / low)
    is_short = wavelengths < np.float32(original / high)
    return np.where(is_long, divided, np.where(is_short, plain, blended))


def _yarn_frequencies(periods: Floats, scaling: YarnScaling, theta: float) -> Floats:
    """Pairs that turn more than beta_fast times in the original context stay as they are, those
    that turn less than beta_slow times are divided by the factor."""
    if theta <= 1:
        raise unexpected("rope_theta", "more than 1 for yarn", theta)
    head_dim = 2 * len(periods)

    def pair_that_turns(times: float) -> float:
        turns = scaling.original_max_positions / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = np.arange(len(periods), dtype=np.float32)
    divided_share = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    kept_share = 1 - divided_share
    divided = np.float32(1) / (np.float32(scaling.factor) * periods)
    return divided * (1 - kept_share) + np.float32(1) / periods * kept_share


def rope_table(rope: Rope, num_positions: int) -> Floats:
    """[num_positions, head_dim]: head_dim / 2 cosines, then head_dim / 2 sines.

    An angle is the float32 product of position and frequency; its cosine is exact but for rounding.
    """
    frequencies = np.array(rope.frequencies, np.float32)
    half, magnitude = len(frequencies), np.float32(rope.magnitude)
    table = np.empty((num_positions, 2 * half), np.float32)
    for start in range(0, num_positions, TABLE_CHUNK):
        rows = table[start : start + TABLE_CHUNK]
        positions = np.arange(start, start + len(rows), dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        rows[:, :half], rows[:, half:] = np.cos(angles), np.sin(angles)
    return table if magnitude == 1 else table * magnitude
