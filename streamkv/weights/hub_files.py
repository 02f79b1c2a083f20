"""Which files of a repository make a checkpoint, from their names.

Owns the choice: config, tokenizer and safetensors, or one .gguf file. It asks neither disk nor
network, but for the index that names the shards. Invariant: nothing is chosen that isn't read
later, so that of weights in several formats one is fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..errors import ModelLoadError
from ..files import read_object
from ..text.tokenizer_files import TOKENIZER_FILES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What says of a model how it is built, how its text becomes tokens, and how it wants to be sampled.
_DESCRIPTIONS = frozenset(
    (
        *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
        *TOKENIZER_FILES,
        INDEX_FILE,
    )
)
# The end of a .gguf file's name tells its format: "….Q4_K_M.gguf", "…-UD-Q4_K_XL.gguf".
_QUANT = re.compile(
    r"(?:^|[-_. ])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|B?F16|F32|FP16|FP32))$",
    re.IGNORECASE,
)
# Names of files whose formats are read here. Without a format in the name, only reading will tell.
_READ = re.compile(r"Q[456]_K(_[SML]|_XL)?|Q[45]_[01]|Q8_0(_[SML]|_XL)?|Q8_K_XL")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_NO_MODEL = re.compile(r"mmproj|imatrix|^ggml-vocab", re.IGNORECASE)
# The best for their size first; what isn't listed may hold other formats too, and comes last.
_PREFERRED = (
    *("Q4_K_M", "Q4_K_S", "Q4_K_L", "Q5_K_M", "Q5_K_S", "Q4_1", "Q4_0", "Q5_1", "Q5_0"),
    *("Q6_K", "Q8_0", "BF16", "F16", "F32", "UD-Q4_K_XL", "UD-Q5_K_XL", "UD-Q6_K_XL"),
)
_NAMED = 8  # files that a message lists


class Choice(NamedTuple):
    """What to fetch: the small files, and then the weights, of which an index names more."""

    descriptions: list[str]
    weights: list[str]


def choose_files(names: Collection[str], *, quant: str = "", file: str = "") -> Choice:
    """The files of the checkpoint among `names`; of .gguf files `file`, or the one of that format.
    ModelLoadError without any."""
    if file or quant:
        return Choice([], [_named_gguf(names, file) if file else _gguf_of(names, quant)])
    safetensors = safetensors_of(names)
    if safetensors and "config.json" in names:
        return Choice(descriptions_of(names), safetensors)
    if any(map(is_gguf, names)):
        return Choice([], [_gguf_of(names, "")])
    raise ModelLoadError(_no_weights(names))


def descriptions_of(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint in Hugging Face format that aren't weights."""
    return sorted(_DESCRIPTIONS.intersection(names))


def safetensors_of(names: Collection[str]) -> list[str]:
    """The index, else the single file; empty if there is neither."""
    return [name for name in (INDEX_FILE, SINGLE_FILE) if name in names][:1]


def with_shards(weights: list[str], folder: Path) -> list[str]:
    """The weights, with the shards that an index in the folder names. ModelLoadError."""
    if weights != [INDEX_FILE]:
        return weights
    return [*weights, *sorted(set(read_weight_map(folder).values()))]


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor → shard, as the folder's index has them. ModelLoadError."""
    index = folder / INDEX_FILE
    weight_map = read_object(index).get("weight_map")
    if not (weight_map and isinstance(weight_map, dict)) or not all(
        isinstance(shard, str) and shard == PurePosixPath(shard).name and shard.isprintable()
        for shard in weight_map.values()
    ):
        raise ModelLoadError(
            f"{index}: expected weight_map to map tensor names to file names; the checkpoint is "
            "broken: get another one"
        )
    return weight_map


# --- GGUF ------------------------------------------------------------------------------------


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def normal_quant(quant: str) -> str:
    """As in the table: Q4_K_M, BF16, UD-Q4_K_XL; "" for none and for "latest"."""
    quant = quant.upper()
    return "" if quant == "LATEST" else quant.replace("FP16", "F16").replace("FP32", "F32")


def is_read(quant: str) -> bool:
    """Whether files of that name hold formats that are read here, as far as names tell."""
    quant = quant.removeprefix("UD-")
    is_quantized = re.match(r"I?Q\d|TQ|MXFP|NVFP", quant) is not None
    return not is_quantized or _READ.fullmatch(quant) is not None


def quant_of(name: str) -> str:
    """The format that the file's name tells; "" if it tells none."""
    found = _QUANT.search(_PART.sub("", _stem(name)))
    return normal_quant(found[1]) if found else ""


def _stem(name: str) -> str:
    return PurePosixPath(name).name[: -len(".gguf")]


def _is_part(name: str) -> bool:
    """Of a model in several files."""
    part = _PART.search(_stem(name))
    return part is not None and int(part[1]) > 1


def _named_gguf(names: Collection[str], file: str) -> str:
    if file not in names:
        raise ModelLoadError(f"it has no file {file}; it has {_some(filter(is_gguf, names))}")
    if _is_part(file):
        raise ModelLoadError(_in_parts(file))
    return file


def _gguf_of(names: Collection[str], quant: str) -> str:
    """The one file of the format, or of the most preferred one."""
    models = [name for name in names if is_gguf(name) and not _NO_MODEL.search(_stem(name))]
    wanted = [quant, f"UD-{quant}"] if quant else list(_PREFERRED)
    by_quant: dict[str, list[str]] = {}
    for name in sorted(models, key=lambda name: (name.count("/"), name)):
        by_quant.setdefault(quant_of(name), []).append(name)
    if not quant:
        wanted += sorted(set(by_quant) - set(wanted), key=lambda other: (other == "", other))
    in_parts = ""
    for one in wanted:
        whole = [name for name in by_quant.get(one, ()) if not _is_part(name)]
        whole = [name for name in whole if name.count("/") == whole[0].count("/")]
        if len(whole) > 1:
            raise ModelLoadError(
                f"it has several files of {one or 'no format that their names tell'}: "
                f"{_some(whole)}; give one as org/name/file.gguf"
            )
        if whole and is_read(one):
            return whole[0]
        in_parts = in_parts or next(filter(_is_part, by_quant.get(one, ())), "")
    if in_parts:
        raise ModelLoadError(_in_parts(in_parts))
    if quant:
        raise ModelLoadError(f"it has no .gguf file of {quant}; it has {_some(models)}")
    raise ModelLoadError(
        f"it has no .gguf file of a format that is read here ({_PREFERRED[0]}, …): "
        f"{_some(models)}; find a repository of the same model that has one"
    )


def _in_parts(name: str) -> str:
    return (
        f"{name} is a model in several files, which are not read; take a smaller format, or fetch "
        "the parts, join them with llama-gguf-split --merge, and give the file"
    )


def _no_weights(names: Collection[str]) -> str:
    """What the repository has instead of weights that are read."""
    expected = "expected config.json with model.safetensors, or a .gguf file"
    if "adapter_config.json" in names:
        return f"{expected}, got an adapter; merge it into its base model, and give the folder"
    if any(PurePosixPath(name).suffix in (".bin", ".pth", ".pt") for name in names):
        return (
            f"{expected}, got weights as PyTorch pickles, which can run code; save the model with "
            "safetensors, or find a repository that has"
        )
    if any(name.endswith(".safetensors") for name in names):
        return (
            f"{expected}, got {_some(name for name in names if name.endswith('.safetensors'))}; "
            "find a repository of the model for transformers, or in GGUF"
        )
    return f"{expected}, got {_some(names)}; it is no language model that is read here"


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more if listed else "none"
