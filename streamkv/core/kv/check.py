"""check_kv: whether pools, tree, tables and pins agree.

Owns nothing, knows everything of the KV books; takes time: for tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ...protocol import Request
from ..integrity import IntegrityError
from ..sequence import Sequence
from .block_pool import BlockPool
from .prefix_node import INT32_BYTES, PrefixNode, salt_digest
from .prefix_tree import PrefixTree
from .tiers import KVTiers


def check_kv(
    tiers: KVTiers,
    holders: Iterable[Sequence],
    *,
    held_blocks: Iterable[int],
    held_slots: Iterable[int],
    pinned: Iterable[PrefixNode],
    num_users: int,
    salt_of: Callable[[Request], str],
) -> None:
    """Raise IntegrityError unless all agree.

    `held_blocks`, `held_slots`: by what is on its way, once for each reference; `pinned`: once for
    each pin; `num_users`: how much is on its way to a node of the tree.
    """
    tiers.pool.check_integrity()
    tiers.slots.check_integrity()
    tiers.tree.check_integrity()
    block_refs = Counter(held_blocks)
    shared: dict[int, tuple[Sequence, bytes]] = {}
    for sequence in holders:
        _check_table(sequence, tiers.tree, salt_of(sequence.request), shared)
        block_refs.update(sequence.block_table)
    _check_counts("block", tiers.pool, block_refs)
    _check_counts("slot", tiers.slots, Counter(held_slots))
    _check_pins(tiers, Counter(pinned))
    counted = sum(node.num_users for node in tiers.tree.nodes())
    if counted > num_users:
        raise IntegrityError("I6", f"nodes expect {counted} copies, {num_users} are on their way")


def _check_counts(what: str, pool: BlockPool, refs: Counter[int]) -> None:
    """I1: a count is the number of tables and copies that hold it."""
    wrong = {
        number: (count, refs[number])
        for number, count in enumerate(pool.ref_counts)
        if count != refs[number]
    }
    if wrong:
        raise IntegrityError("I1", f"{what}s by (reference count, tables and copies): {wrong}")


def _check_pins(tiers: KVTiers, pins: Counter[PrefixNode]) -> None:
    nodes = tiers.tree.nodes()
    for node in nodes:
        if node.pins != pins[node]:
            raise IntegrityError("I6", f"{node} is pinned by {pins[node]}")
    blocks = {node.block_id for node in nodes if node.pins and node.block_id >= 0}
    only_in_slots = [n for n in nodes if n.slot >= 0 and n.block_id < 0 and n.record < 0]
    slots = {node.slot for node in only_in_slots if node.pins}
    for what, pool, pinned in (("block", tiers.pool, blocks), ("slot", tiers.slots, slots)):
        listed = pool.free_blocks(pinned=True)
        if {number for number in pinned if pool.ref_counts[number] == 0} != set(listed):
            raise IntegrityError("I6", f"pinned {what}s: {pinned}, those in the list: {listed}")


def _check_table(
    sequence: Sequence,
    tree: PrefixTree,
    cache_salt: str,
    shared: dict[int, tuple[Sequence, bytes]],
) -> None:
    """I2; I6: what is cached or shared of the table is this sequence's prefix."""
    block_size, num_computed = tree.block_size, sequence.num_computed_tokens
    if num_computed > sequence.num_tokens and sequence.finish_reason is None:
        raise IntegrityError("I2", f"{sequence} computed more tokens than it has")
    num_spare = len(sequence.block_table) - -(-num_computed // block_size)
    # It was run ahead once, in vain.
    if num_spare < 0 or (num_spare > 0 and not sequence.is_gated):
        raise IntegrityError("I2", f"{sequence} has a table of the wrong length")
    prefix = salt_digest(cache_salt)
    # The last token of one that is gated may be computed already, and is to be computed again.
    packed = sequence.token_ids[: num_computed + sequence.is_gated].tobytes()
    known = len(prefix) + len(packed)  # of tokens that were dropped, nobody knows the content
    packed = prefix + packed
    for index, block_id in enumerate(sequence.block_table):
        end = min(known, len(prefix) + (index + 1) * block_size * INT32_BYTES)
        cached = tree.prefix_of(block_id)
        if cached is not None:
            content = b"".join(cached)
            is_placed = end - len(content) < block_size * INT32_BYTES and len(content) <= end
            if not is_placed or packed[: len(content)] != content:
                raise IntegrityError("I6", f"block {block_id} of {sequence} holds another prefix")
        if block_id in shared:
            other, content = shared[block_id]
            num = min(end, len(content))
            if packed[:num] != content[:num]:
                raise IntegrityError("I6", f"block {block_id} of {other} is also of {sequence}")
        else:
            shared[block_id] = (sequence, packed[:end])
