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
    name, what = "max_tokens", "the request"  # too large, maybe
    remedy = "shorten the prompt, lower max_tokens"
    if params.use_beam_search:
        width = params.num_sequences
        width_name = "n" if params.best_of is None else "best_of"
        limits = {
            "--max-num-seqs": max_num_seqs,
            "--max-num-batched-tokens": max_num_batched_tokens,  # a step has one of each beam
        }
        too_low = [flag for flag, limit in limits.items() if limit < width]
        if too_low:
            raise InvalidRequestError(
                f"{width_name}: expected at most {min(limits.values())} beams, as many as "
                f"sequences run at once, got {width}; ask for fewer, or start with a higher "
                f"{' and '.join(too_low)}",
                param=width_name,
            )
        if request.max_tokens > 1:
            name, what = width_name, f"a search with {width} beams"
            remedy = f"lower {width_name}, {remedy}"
    num_needed = num_blocks_needed(request, block_size)
    if num_needed > num_blocks:
        raise CapacityError(
            f"{name}: {what} needs {num_needed} KV blocks of {block_size} tokens "
            f"({num_prompt_tokens} in the prompt, max_tokens {request.max_tokens}), the pool has "
            f"{num_blocks} ({num_blocks * block_size} tokens); {remedy}, or start with more KV "
            "memory: by --num-gpu-blocks-override where that is given, else by "
            "--kv-cache-memory-bytes or --gpu-memory-utilization",
            param=name,
        )
