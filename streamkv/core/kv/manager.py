"""KVManager: the block tables of sequences, over cached blocks on three tiers.

Owns every change to `Sequence.block_table` and `Sequence.prefix_node`, and who is pinned for
whom. Must not know queues, budgets of tokens, or clocks. Invariants: a table has exactly the
blocks its computed tokens need; a block in two tables holds the same tokens for both, and neither
writes it; once all sequences have gone and all copies have ended, every block and slot is free.

A prefix is found on all tiers (`match`). Its part on the device becomes a table (`share`): full
blocks by reference, a block that matches partly by copying it. `load` brings the rest there, as
cached blocks that are found by the next `match`. Nothing else differs between a prefix of another
request, a fork, and what a preempted sequence left behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ...protocol import Request, StepOutput, StoredBlock, StoreOp, StoreResult
from ..integrity import IntegrityError
from ..sequence import Sequence
from .block_pool import BlockPool
from .check import check_kv
from .copies import Copies
from .loading import Loading
from .prefix_node import PrefixMatch, PrefixNode
from .prefix_tree import PrefixTree
from .sessions import Sessions
from .storing import Storing
from .tiers import KVTiers
from .types import Copy, GrowResult, Keep, KVStats

__all__ = ["Copy", "GrowResult", "KVManager", "KVStats", "Keep", "PrefixMatch", "PrefixNode"]


class KVManager:
    """`max_copies`: OUT and IN copies that one step may have; BLOCK copies aren't bounded."""

    __slots__ = (
        "_copies",
        "_copying",
        "_loading",
        "_lost",
        "_pinned",
        "_sessions",
        "_stats",
        "_storing",
        "_tails",
        "_tiers",
        "block_size",
        "is_shared",
        "pool",
        "tree",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_host_slots: int = 0,
        has_store: bool = False,
        max_copies: int = 32,
        max_session_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        # Between requests; or each of them has a root of its own.
        self.is_shared = enable_prefix_caching
        self._stats = KVStats()
        self._tiers = KVTiers(num_blocks, num_host_slots, block_size)
        self.pool: BlockPool = self._tiers.pool
        self.tree: PrefixTree = self._tiers.tree
        self._copies = Copies(self._tiers, self._stats, max_copies)
        self._storing = Storing(self._tiers, self._copies, self._stats, has_store=has_store)
        self._loading = Loading(self._tiers, self._copies, self._storing, self._stats)
        self._sessions = Sessions(self._tiers, max_session_blocks)
        self._pinned: dict[Sequence, list[PrefixNode]] = {}  # preempted ones
        self._tails: dict[Sequence, PrefixNode] = {}  # published leaves, with a table's last block
        self._copying: dict[int, Sequence] = {}  # by its last block, which is on its way
        self._lost: list[Sequence] = []  # since the last `acknowledge` began

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _salt(self, request: Request) -> str:
        return request.cache_salt if self.is_shared else request.request_id

    # --- finding -----------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix of its tokens, on any tier; takes no reference. Tokens after the last
        that has a score, if it wants them, are to be computed."""
        token_ids, num_scored = sequence.token_ids, sequence.num_scored_tokens
        if num_scored < sequence.num_prompt_tokens:
            token_ids = token_ids[:num_scored]
        return self.tree.match(token_ids, self._salt(sequence.request))

    def num_free_blocks_needed(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Free blocks it takes to hold all its tokens now: new ones, and hits that are free.

        The tail's source is one of these while it is copied; without room for it, it's not used.
        """
        num_needed = self._num_needed(sequence, match)
        return num_needed + self._num_for_tail(match, num_needed)

    def _num_needed(self, sequence: Sequence, match: PrefixMatch) -> int:
        ref_counts = self.pool.ref_counts
        num_held_hits = 0
        for node in match.nodes[: match.num_device]:
            if ref_counts[node.block_id]:
                num_held_hits += 1
        num_found = num_held_hits + self._loading.num_awaited(sequence, match)
        return self.num_blocks_for(sequence.num_tokens) - num_found

    def _num_for_tail(self, match: PrefixMatch, num_needed: int) -> int:
        """1 if its source is taken from the free ones, and there are as many as that."""
        tail = match.tail
        if tail is None or not match.is_on_device or self.pool.ref_counts[tail.block_id]:
            return 0
        return int(self.pool.num_free > num_needed)

    def load(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Begin to bring what was found to the device. True: it waits (see `take_loaded`).

        False if nothing is to be brought, or if it has waited since it last had a table: then it
        takes what is there.
        """
        return self._loading.begin(sequence, match)

    def cancel_load(self, sequence: Sequence) -> None:
        """It has ended meanwhile. Idempotent."""
        self._loading.cancel(sequence)

    def take_loaded(self) -> list[Sequence]:
        """Whose loads have ended since the last call, well or not: they may match again."""
        return self._loading.take_loaded()

    def begin_reads(self) -> bool:
        """From disk, what loads need. True: some have ended without (see `take_loaded`)."""
        return self._loading.begin_reads()

    # --- tables ------------------------------------------------------------------------------

    def share(self, sequence: Sequence, match: PrefixMatch, *, is_counted: bool = False) -> None:
        """Begin the (empty) table of a sequence with what of a match is on the device.

        `is_counted`: in the statistics of hits.
        """
        pool = self.pool
        nodes = match.nodes[: match.num_device]
        for node in nodes:
            pool.acquire(node.block_id)
            node.given_up = False
        sequence.block_table = [node.block_id for node in nodes]
        sequence.prefix_node = nodes[-1] if nodes else None
        sequence.num_computed_tokens = len(nodes) * self.block_size
        tail = match.tail
        if tail is not None and match.is_on_device:
            num_needed = self.num_blocks_for(sequence.num_tokens) - len(nodes)
            if pool.num_free > (0 if pool.ref_counts[tail.block_id] else num_needed):
                pool.acquire(tail.block_id)
                tail.given_up = False
                self._append_copy(sequence, tail.block_id)
                sequence.num_computed_tokens += match.num_tail_tokens
        if is_counted:
            self._loading.count_hits(sequence, match)
        self._loading.forget_done(sequence)

    def _append_copy(self, sequence: Sequence, source: int) -> None:
        """Behind the table. The reference to the source is the copy's from now on."""
        target = self._copies.take_block()
        self.pool.acquire(target)  # once for the copy
        sequence.block_table.append(target)
        self._copying[target] = sequence
        self._copies.copy_block(source, target, partial(self._end_block_copy, target))

    def _end_block_copy(self, target: int, ok: bool) -> None:
        sequence = self._copying.pop(target)
        if not ok and target in sequence.block_table:
            self._lost.append(sequence)

    def num_new_blocks(self, sequence: Sequence, end: int) -> int:
        """To compute up to `end`: appended ones, and one if it first writes a shared block."""
        num_blocks = -(-end // self.block_size) - len(sequence.block_table)
        return max(num_blocks, 0) + self._writes_shared(sequence, end)

    def _writes_shared(self, sequence: Sequence, end: int) -> bool:
        begin = sequence.num_computed_tokens
        if begin % self.block_size == 0 or begin >= end:
            return False
        block_id = sequence.block_table[-1]
        count = self.pool.ref_counts[block_id]
        return count > 1 and count - self._copies.num_refs(block_id) > 1

    def grow(self, sequence: Sequence, end: int) -> GrowResult | None:
        """Take the blocks to compute up to `end`. None, and nothing is changed, if they aren't
        free. A shared one that it first writes is replaced in the table by a copy.

        Copies on the way don't share it: they were made before anything is written.
        """
        table, take_block = sequence.block_table, self._copies.take_block
        num_blocks = -(-end // self.block_size) - len(table)
        rewritten = sequence.num_computed_tokens % self.block_size > 0 and self._writes_shared(
            sequence, end
        )
        if num_blocks + rewritten > self.pool.num_free:
            return None
        if rewritten:  # its last block
            self._append_copy(sequence, table.pop())
            self._tails.pop(sequence, None)
        # One, as most are, without the cost of a loop.
        appended = [take_block()] if num_blocks == 1 else [take_block() for _ in range(num_blocks)]
        table += appended
        return appended, rewritten

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin the (empty) table of the child with all of the parent's blocks.

        Nothing of the parent may be on its way.
        """
        if parent.block_table and parent.block_table[-1] in self._copying:
            raise IntegrityError("I4", f"{parent} was forked while its last block is copied")
        for block_id in parent.block_table:
            self.pool.acquire(block_id)
        child.block_table = parent.block_table.copy()
        child.prefix_node = parent.prefix_node
        child.num_computed_tokens = parent.num_computed_tokens
        if parent in self._tails:
            self._tails[child] = self._tails[parent]

    def publish(self, sequence: Sequence, num_tokens: int, *, tail: bool = False) -> None:
        """Offer the full blocks of its first `num_tokens` tokens, whose KV is computed.

        `tail`: and what of them is in the block behind. It may still be written behind that. A
        block that is still to be copied isn't offered.
        """
        block_size, table, token_ids = self.block_size, sequence.block_table, sequence.token_ids
        node = sequence.prefix_node
        if node is not None and node.parent is None:  # evicted; this table has its own copy of it
            node = None
        first = 0 if node is None else node.num_tokens // block_size
        if self._copying:
            for index in range(first, len(table)):
                if table[index] in self._copying:
                    num_tokens = min(num_tokens, index * block_size)
        num_full, num_tail_tokens = num_tokens // block_size, num_tokens % block_size
        if first > num_full or (first == num_full and not (tail and num_tail_tokens)):
            return
        parent, cached = node or self.tree.root(self._salt(sequence.request)), self.tree.blocks
        for index in range(first, num_full):
            key = token_ids[index * block_size : (index + 1) * block_size].tobytes()
            node = parent = parent.child(key) or parent.add_child(key)
            if node.block_id < 0:
                block_id = table[index]
                if cached[block_id] is None and node.slot < 0:  # a new one; as `fill` does it
                    cached[block_id] = node
                    node.block_id = block_id
                else:
                    self._tiers.fill(node, block_id)
        sequence.prefix_node = node
        if self._tails:
            self._tails.pop(sequence, None)  # its block may be full by now
        if tail and num_tail_tokens:
            key = token_ids[num_full * block_size : num_tokens].tobytes()
            leaf = self._tails[sequence] = self.tree.child(parent, key)
            if leaf.block_id < 0:
                self._tiers.fill(leaf, table[num_full])

    def release(self, sequence: Sequence, *, keep: Keep) -> None:
        """Give back its table, tail first, so that leaves are evicted before their parents.

        Publishes nothing that wasn't, but fills the holes in its path.
        """
        tiers, table = self._tiers, sequence.block_table
        node, tail = sequence.prefix_node, self._tails.pop(sequence, None)
        path = [] if node is None else node.path()
        if keep is Keep.CACHE:
            self._storing.persist(path)
        if tail is not None and tail.is_attached:
            path.append(tail)
        if keep is Keep.SWAP:
            self.unpin(sequence)
            self._pinned[sequence] = path
            tiers.pin(path)
        for block_id in reversed(table[len(path) :]):
            tiers.release_block(block_id)
        pool, end = self.pool, self.pool.num_blocks
        plain: list[int] = []  # as most are; in one go
        for node, block_id in zip(reversed(path), reversed(table[: len(path)]), strict=True):
            if node.block_id < 0 and keep is not Keep.FORGET:
                tiers.fill(node, block_id)
            if node.block_id == block_id < end and node.slot < 0 and not node.pins:
                plain.append(block_id)
                continue
            pool.release_all(plain)
            plain.clear()
            tiers.release_block(block_id)
            tiers.touch(node)
        pool.release_all(plain)
        if keep is Keep.GIVE_UP:
            self._give_up(path)
        sequence.block_table = []
        sequence.prefix_node = None
        sequence.num_computed_tokens = 0

    def _give_up(self, path: list[PrefixNode]) -> None:
        """What nobody else uses isn't worth a copy."""
        ref_counts = self.pool.ref_counts
        for node in path:
            if node.pins == 0 and node.block_id >= 0 and ref_counts[node.block_id] == 0:
                node.given_up = True

    def unpin(self, sequence: Sequence) -> None:
        """It has resumed, or ended while it waited. Idempotent."""
        self._loading.forget_done(sequence)
        self._tiers.unpin(self._pinned.pop(sequence, []))

    def end_request(self, request: Request) -> None:
        """All its sequences have ended and were released: without prefix caching, forget it; and
        its session, if that had no more time."""
        if not self.is_shared:
            self._tiers.drop_root(request.request_id)
        elif request.session_id and request.session_ttl_s <= 0:
            self._sessions.drop((request.cache_salt, request.session_id))

    # --- sessions ----------------------------------------------------------------------------

    def keep_session(self, request: Request, sequence: Sequence, now_s: float) -> None:
        """Pin what it has published, which it must still hold, for the request's session."""
        if not (request.session_id and request.session_ttl_s > 0 and self.is_shared):
            return
        node, tail = sequence.prefix_node, self._tails.get(sequence)
        path = [] if node is None else node.path()
        if tail is not None and tail.is_attached:
            path.append(tail)
        key = (request.cache_salt, request.session_id)
        self._sessions.keep(key, path, now_s + request.session_ttl_s)

    def expire_sessions(self, now_s: float) -> None:
        """Unpin what nobody has come back for in time."""
        self._sessions.expire(now_s)

    # --- copies ------------------------------------------------------------------------------

    def take_copies(self) -> list[Copy]:
        """Those of the step being built, in order; what it has to spare is used."""
        self._loading.make_copies()
        self._storing.make_copies()
        return self._copies.take()

    def acknowledge(self, copies: list[Copy], output: StepOutput) -> list[Sequence]:
        """Take in which copies were made. `copies`: those of the output's own step.

        Comes before anything of that step is published. Returns sequences with a block in their
        table that was not copied: they are lost.
        """
        self._lost = []
        self._copies.acknowledge(copies, output)
        return self._lost

    @property
    def has_copies_to_make(self) -> bool:
        """A step without tokens would have some."""
        return self._copies.has_queued or self._loading.can_copy or self._storing.can_copy

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that are free once the copies on their way have ended."""
        return self._copies.num_returning_blocks()

    # --- disk --------------------------------------------------------------------------------

    def take_store_ops(self) -> list[StoreOp]:
        """For the store, in this order."""
        self._loading.begin_reads()
        return self._storing.take_ops()

    def on_store_result(self, result: StoreResult) -> None:
        """Take in the end of one of these."""
        self._storing.on_result(result)

    def insert_stored(self, blocks: Iterable[StoredBlock]) -> None:
        """What the store had when it was opened, parents first."""
        if self._tiers.slots.num_blocks:  # without one, nothing can be read
            self.tree.insert_stored(blocks)

    # --- all of it ---------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Copies that were taken, or store ops, are on their way: something will still happen."""
        return (
            self._copies.num_on_the_way > 0
            or self._storing.has_ops
            or self._loading.has_reads_waiting
        )

    @property
    def num_held(self) -> tuple[int, int]:
        """Blocks and slots that tables, copies, loads or the store hold."""
        return self.pool.num_held, self._tiers.slots.num_held

    def resize(self, num_blocks: int) -> None:
        """Blocks from `num_blocks` on aren't taken any more; those referenced go when released."""
        self._tiers.resize(num_blocks)

    @property
    def stats(self) -> KVStats:
        """The same object at each call."""
        tree = self.tree
        held = {*self._copies.held()[1], *self._loading.held_slots()}  # some of them to be cached
        num_to_cache = sum(tree.slots[slot] is None for slot in held)
        self._stats.num_host_slots_used = tree.num_cached_slots + num_to_cache
        self._stats.num_sessions = len(self._sessions)
        self._stats.num_pinned_blocks = self.pool.num_pinned
        return self._stats

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless everything agrees with the tables of all `holders`."""
        copies, loading, storing = self._copies, self._loading, self._storing
        blocks, slots = copies.held()
        paths = [*self._pinned.values(), self._sessions.pinned()]
        check_kv(
            self._tiers,
            holders,
            held_blocks=blocks,
            held_slots=[*slots, *loading.held_slots(), *storing.held_slots()],
            pinned=[node for path in paths for node in path],
            num_users=copies.num_on_the_way + loading.num_promotions + storing.num_on_the_way,
            salt_of=self._salt,
        )
