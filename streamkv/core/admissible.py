"""What can never run, whatever the load: refused at once, with the numbers."""

from __future__ import annotations

from ..errors import CapacityError, ContextLengthError, InvalidRequestError
from ..protocol import Request


def num_blocks_needed(request: Request, block_size: int) -> int:
    """In the worst case, with no one else there: for one sequence, as others of its request can
    wait for it; for all beams, which go on together and share the prompt's full blocks."""
    num_prompt_tokens, params = len(request.prompt_token_ids), request.sampling
    num_computed = num_prompt_tokens + request.max_tokens - 1  # never the last token
    num_blocks = -(-num_computed // block_size)
    if not params.use_beam_search or num_computed == num_prompt_tokens:
        return num_blocks
    num_shared = num_prompt_tokens // block_size
    return num_shared + params.num_sequences * (num_blocks - num_shared)


def check_admissible(
    request: Request,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> None:
    """Raise InvalidRequestError, ContextLengthError or CapacityError if it could never run."""
    num_prompt_tokens, params = len(request.prompt_token_ids), request.sampling
    for name, number in (("prompt", num_prompt_tokens), ("max_tokens", request.max_tokens)):
        if number < 1:
            raise InvalidRequestError(
                f"{name}: expected at least one token, got {number}", param=name
            )
    num_tokens = num_prompt_tokens + request.max_tokens
    if num_tokens > max_model_len:
        raise ContextLengthError(
            f"expected at most {max_model_len} tokens of context, got {num_tokens} "
            f"({num_prompt_tokens} in the prompt + max_tokens {request.max_tokens}); "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    beams, remedy = "", "shorten the prompt, lower max_tokens"
    if params.use_beam_search:
        width, name = params.num_sequences, "n" if params.best_of is None else "best_of"
        limits = {
            "--max-num-seqs": max_num_seqs,
            "--max-num-batched-tokens": max_num_batched_tokens,  # a step has one of each beam
        }
        too_low = [flag for flag, limit in limits.items() if limit < width]
        if too_low:
            raise CapacityError(
                f"{name}: expected at most {min(limits.values())} beams, as many as sequences run "
                f"at once, got {width}; ask for fewer, or start the server with a higher "
                f"{' and '.join(too_low)}",
                param=name,
            )
        if request.max_tokens > 1:
            beams, remedy = f" for each of {width} beams", f"lower {name}, {remedy}"
    num_needed = num_blocks_needed(request, block_size)
    if num_needed > num_blocks:
        raise CapacityError(
            f"needs {num_needed} blocks of {block_size} tokens ({num_prompt_tokens} in the "
            f"prompt + max_tokens {request.max_tokens}{beams}), the pool has {num_blocks} "
            f"({num_blocks * block_size} tokens); {remedy}, or start the server with more "
            "KV memory: --kv-cache-memory-bytes, --gpu-memory-utilization or "
            "--num-gpu-blocks-override",
            param="max_tokens",
        )
