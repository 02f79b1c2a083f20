"""Loading: cached blocks on their way to the device, and the sequences that wait for them.

Owns who waits for which block, and one reference to the host slot a block is loaded from. Must
not know queues, nor whether waiting is better than computing. Invariants: a block is loaded once,
however many wait for it; each load ends, whatever fails; once loaded, a block is an ordinary
cached one that nobody holds.

Loads read from disk in turns, and few reads are on their way at a time: so a short load doesn't
wait for a long one, nor for what nobody wants any more.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from ..sequence import Sequence
from .copies import Copies
from .prefix_node import NOWHERE, PrefixMatch, PrefixNode
from .storing import Storing
from .tiers import KVTiers
from .types import KVStats

MAX_READS = 8  # on their way


class Load:
    """What one sequence waits for."""

    __slots__ = ("from_disk", "from_host", "is_cancelled", "num_left", "path", "reads", "sequence")

    def __init__(self, sequence: Sequence, path: list[PrefixNode]) -> None:
        self.sequence = sequence
        self.path = path
        self.num_left = 0
        self.from_host: set[PrefixNode] = set()
        self.from_disk: set[PrefixNode] = set()
        self.reads: deque[_Promotion] = deque()  # that it needs; another load may begin them
        self.is_cancelled = False


class _Promotion:
    """One block on its way up: record, then slot, then block."""

    __slots__ = ("loads", "node", "slot")

    def __init__(self, node: PrefixNode) -> None:
        self.node = node
        self.slot = NOWHERE  # held, once it has one
        self.loads: list[Load] = []


class Loading:
    __slots__ = (
        "_copies",
        "_done",
        "_ended",
        "_loads",
        "_num_reads",
        "_promotions",
        "_readers",
        "_stats",
        "_storing",
        "_tiers",
        "_uploads",
    )

    def __init__(self, tiers: KVTiers, copies: Copies, storing: Storing, stats: KVStats) -> None:
        self._tiers = tiers
        self._copies = copies
        self._storing = storing
        self._stats = stats
        self._promotions: dict[PrefixNode, _Promotion] = {}
        self._readers: deque[Load] = deque()  # that have something to read; the next one first
        self._num_reads = 0  # on their way
        self._uploads: deque[_Promotion] = deque()  # wait for a block and a copy
        self._loads: dict[Sequence, Load] = {}  # going on
        self._ended: list[Load] = []  # to be told
        self._done: dict[Sequence, Load] = {}  # ended; until the sequence goes on

    # --- who waits ---------------------------------------------------------------------------

    def begin(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Load what isn't on the device. False: there is nothing, or it has waited already."""
        if sequence in self._loads:
            return True
        if match.is_on_device or sequence in self._done:
            return False
        path = match.nodes if match.tail is None else [*match.nodes, match.tail]
        load = self._loads[sequence] = Load(sequence, path)
        for node in path:
            if node.block_id >= 0:
                continue
            (load.from_host if node.slot >= 0 else load.from_disk).add(node)
            promotion = self._promotions.get(node) or self._start(node)
            promotion.loads.append(load)
            load.num_left += 1
            if promotion.slot < 0:
                load.reads.append(promotion)
        if load.reads:
            self._readers.append(load)
        self._touch(path)
        return True

    def cancel(self, sequence: Sequence) -> None:
        """It doesn't wait any more."""
        load = self._loads.pop(sequence, None) or self._done.pop(sequence, None)
        if load is not None:
            load.is_cancelled = True
            if load in self._ended:
                self._ended.remove(load)
            while self._next_read(load) is not None:  # another one wants it
                load.reads.popleft()

    def forget_done(self, sequence: Sequence) -> None:
        """It went on, or ended: it may wait again."""
        self._done.pop(sequence, None)

    def count_hits(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Of what it has from the match: by where it was before it waited."""
        load = self._done.get(sequence)
        num_tokens, stats = sequence.num_computed_tokens, self._stats
        stats.num_device_hit_tokens += num_tokens
        if load is None:
            return
        block_size = self._tiers.tree.block_size
        hits = [(node, block_size) for node in match.nodes[: match.num_device]]
        if match.tail is not None:
            hits.append((match.tail, num_tokens - len(hits) * block_size))
        num_host = sum(num for node, num in hits if node in load.from_host)
        num_disk = sum(num for node, num in hits if node in load.from_disk)
        stats.num_device_hit_tokens -= num_host + num_disk
        stats.num_host_hit_tokens += num_host
        stats.num_disk_hit_tokens += num_disk

    def take_loaded(self) -> list[Sequence]:
        """Whose loads have ended, well or not."""
        self._skip_stale_uploads()
        for load in self._readers:
            self._next_read(load)
        ended, self._ended = self._ended, []
        for load in ended:
            self._touch(load.path)
        return [load.sequence for load in ended]

    def _touch(self, path: list[PrefixNode]) -> None:
        for node in reversed(path):
            self._tiers.touch(node)

    # --- what for ----------------------------------------------------------------------------

    def _start(self, node: PrefixNode) -> _Promotion:
        promotion = self._promotions[node] = _Promotion(node)
        node.num_users += 1
        if node.slot >= 0:
            self._hold_slot(promotion)
        return promotion

    def _hold_slot(self, promotion: _Promotion) -> None:
        promotion.slot = promotion.node.slot
        self._tiers.slots.acquire(promotion.slot)
        self._uploads.append(promotion)

    def _end(self, promotion: _Promotion) -> None:
        node = promotion.node
        del self._promotions[node]
        node.num_users -= 1
        if promotion.slot >= 0:
            self._tiers.release_slot(promotion.slot)
        for load in promotion.loads:
            load.num_left -= 1
            if load.num_left == 0 and not load.is_cancelled:
                load.reads.clear()
                self._done[load.sequence] = self._loads.pop(load.sequence)
                self._ended.append(load)
        self._tiers.tree.prune(node)

    def _is_stale(self, promotion: _Promotion) -> bool:
        """Nobody needs it, or somebody has computed it meanwhile."""
        node = promotion.node
        is_wanted = any(not load.is_cancelled for load in promotion.loads)
        return not (is_wanted and node.is_attached and node.block_id < 0)

    # --- disk to slot ------------------------------------------------------------------------

    def _next_read(self, load: Load) -> _Promotion | None:
        """The first that is still to be read for it; those before it are out of the queue."""
        while load.reads:
            promotion = load.reads[0]
            is_begun = promotion.slot >= 0 or self._promotions.get(promotion.node) is not promotion
            if not is_begun and not self._is_stale(promotion):
                return promotion
            load.reads.popleft()
            if not is_begun:
                self._end(promotion)
        return None

    def begin_reads(self) -> bool:
        """As many as there are slots for, one of each load in turn. True: loads have ended, for
        their blocks are not to be found any more."""
        tiers, readers = self._tiers, self._readers
        while readers and tiers.slots.num_free and self._num_reads < MAX_READS:
            load = readers.popleft()
            promotion = self._next_read(load)
            if promotion is None:
                continue
            readers.append(load)
            node = promotion.node
            if node.slot >= 0:
                self._hold_slot(promotion)
            elif node.record >= 0:
                promotion.slot = tiers.take_slot()
                self._num_reads += 1
                self._storing.read(node, promotion.slot, partial(self._end_read, promotion))
            else:
                self._end(promotion)
        return bool(self._ended)

    def _end_read(self, promotion: _Promotion, ok: bool) -> None:
        node = promotion.node
        self._num_reads -= 1
        if ok:
            if node.slot < 0:
                self._tiers.tree.set_slot(node, promotion.slot)
            self._uploads.append(promotion)
        else:
            self._end(promotion)

    # --- slot to block -----------------------------------------------------------------------

    @property
    def can_copy(self) -> bool:
        """A block waits in a slot, and one on the device is free."""
        return bool(self._uploads) and self._tiers.pool.num_free > 0

    def _skip_stale_uploads(self) -> None:
        while self._uploads and self._is_stale(self._uploads[0]):
            self._end(self._uploads.popleft())

    def make_copies(self) -> None:
        self._skip_stale_uploads()
        while self._copies.num_left > 0 and self.can_copy:
            promotion = self._uploads.popleft()
            self._copies.copy_in(promotion.slot, partial(self._end_copy, promotion))
            self._skip_stale_uploads()

    def _end_copy(self, promotion: _Promotion, block_id: int, ok: bool) -> None:
        if ok:
            self._stats.num_blocks_in += 1
            if promotion.node.is_attached:
                self._tiers.fill(promotion.node, block_id)
        self._end(promotion)

    @property
    def has_reads_waiting(self) -> bool:
        """That can begin."""
        return self._tiers.slots.num_free > 0 and any(load.reads for load in self._readers)

    def num_awaited(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Blocks that another one waits for already, and for which this one would wait."""
        if match.num_device == len(match.nodes) or sequence in self._done:
            return 0
        return sum(node in self._promotions for node in match.nodes[match.num_device :])

    # --- checks ------------------------------------------------------------------------------

    def held_slots(self) -> list[int]:
        """Once for each reference to them."""
        return [p.slot for p in self._promotions.values() if p.slot >= 0]

    @property
    def num_promotions(self) -> int:
        return len(self._promotions)
