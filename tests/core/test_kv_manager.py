"""KVManager, one behaviour at a time. Any order of them: `test_kv_tiers`."""

import pytest
from core.kv_world import Tokens, make_request
from msgspec import structs

from streamkv.core.integrity import IntegrityError
from streamkv.core.kv.manager import Keep, KVManager
from streamkv.protocol import CopyKind, StepOutput, StoreResult, pack_ints

BLOCK, OUT, IN = CopyKind.BLOCK, CopyKind.OUT, CopyKind.IN


class Book:
    """A KVManager whose copies are made at once, and what it did."""

    def __init__(self, num_blocks=8, block_size=4, **options):
        options.setdefault("enable_prefix_caching", True)
        self.kv = KVManager(num_blocks, block_size, **options)
        self.num_requests = 0

    def start(self, token_ids, salt="", session="", request=None):
        """A sequence with the table for all of these tokens, computed but for the last."""
        if request is None:
            request = make_request(f"r{self.num_requests}", salt, session)
            self.num_requests += 1
        sequence = Tokens(request, list(token_ids), list(token_ids))
        self.resume(sequence)
        return sequence

    def resume(self, sequence):
        match = self.kv.match(sequence)
        assert self.kv.num_free_blocks_needed(sequence, match) <= self.kv.pool.num_free
        self.kv.share(sequence, match, is_counted=True)
        sequence.hit = sequence.num_computed_tokens
        self.compute(sequence, len(sequence.token_ids))
        self.kv.unpin(sequence)

    def compute(self, sequence, end):
        result = self.kv.grow(sequence, end)
        sequence.num_computed_tokens = end
        sequence.token_ids.extend(sequence.script[len(sequence.token_ids) : end])
        return result

    def extend(self, sequence, *token_ids):
        sequence.token_ids.extend(token_ids)
        return self.compute(sequence, len(sequence.token_ids))

    def end(self, sequence, keep=Keep.CACHE, tail=True):
        if keep is not Keep.FORGET:
            self.kv.publish(sequence, sequence.num_computed_tokens, tail=tail)
        self.kv.release(sequence, keep=keep)

    def run(self, token_ids, **rest):
        sequence = self.start(token_ids, **rest)
        self.end(sequence)
        return sequence

    def step(self, failed=(), error=""):
        """Make the copies; those whose place is in `failed` fail."""
        copies = self.kv.take_copies()
        done = [] if error else [c.number for i, c in enumerate(copies) if i not in failed]
        lost = self.kv.acknowledge(
            copies,
            StepOutput(
                step_id=0,
                sampled=b"",
                copies_done=pack_ints(done),
                copies_failed=pack_ints([copies[i].number for i in failed]),
                error=error,
            ),
        )
        self.lost = lost
        return [(copy.kind, copy.source, copy.target) for copy in copies]

    def load(self, token_ids):
        """Wait for what isn't on the device; the sequence that waited, and its match."""
        sequence = Tokens(make_request("load"), list(token_ids), list(token_ids))
        assert self.kv.load(sequence, self.kv.match(sequence))
        return sequence

    @property
    def num_cached(self):
        return sum(node is not None for node in self.kv.tree.blocks)

    def check(self, *holders):
        self.kv.check_integrity(holders)


# --- forks -----------------------------------------------------------------------------------


def test_a_prefix_is_hit_by_the_token():
    book = Book()
    book.run([1, 2, 3, 4, 5, 6, 7])
    other = book.start([1, 2, 3, 4, 5, 6, 9, 9])
    assert other.hit == 6
    assert book.step() == [(BLOCK, 1, other.block_table[1])]
    assert other.block_table[0] == 0 and other.block_table[1] != 1
    book.check(other)


def test_the_source_of_a_tail_stays_until_it_is_copied():
    book = Book(num_blocks=4)
    book.run([1, 2, 3, 4, 5, 6])
    other = book.start([1, 2, 3, 4, 5, 9])
    assert book.kv.pool.num_free == 1 and book.kv.num_returning_blocks == 1
    book.check(other)
    book.step()
    assert book.kv.pool.num_free == 2
    book.check(other)


def test_a_pool_without_room_for_the_tails_source_computes_the_tail():
    book = Book(num_blocks=2)
    book.run([1, 2, 3, 4, 5, 6])
    other = book.start([1, 2, 3, 4, 5, 9])
    assert other.hit == 4 and book.step() == []
    book.check(other)


def test_a_tail_that_somebody_holds_needs_no_room():
    book = Book(num_blocks=3)
    leader = book.start([1, 2, 3, 4, 5, 6])
    book.kv.publish(leader, 6, tail=True)
    follower = book.start([1, 2, 3, 4, 5, 6])
    assert follower.hit == 5
    book.check(leader, follower)


def test_a_leaf_is_written_behind_its_tokens_and_becomes_a_full_block():
    book = Book()
    leader = book.start([1, 2, 3, 4, 5, 6])
    book.kv.publish(leader, 6, tail=True)
    book.extend(leader, 7)
    book.kv.publish(leader, 7, tail=True)
    assert book.num_cached == 2  # the longer leaf took the place of the shorter
    book.extend(leader, 8, 9)
    book.kv.publish(leader, 9)
    assert [len(node.key) // 4 for node in book.kv.tree.nodes()] == [4, 4]
    book.end(leader)
    assert book.start([1, 2, 3, 4, 5, 6, 7, 8, 9, 9]).hit == 9


def test_what_is_published_first_stays_shared_and_the_other_block_is_next_to_go():
    book = Book()
    first, second = book.start([1, 2, 3, 4, 5]), book.start([1, 2, 3, 4, 5])
    book.kv.publish(first, 5)
    book.kv.publish(second, 5)
    assert first.prefix_node is second.prefix_node
    own = second.block_table[0]
    book.end(first, tail=False)
    book.end(second, tail=False)
    assert own in book.kv.pool.free_blocks()[:3]
    assert book.kv.pool.free_blocks()[-1] == 0
    book.check()


def test_a_copy_of_the_prefix_takes_the_place_of_an_evicted_one():
    book = Book(num_blocks=4, block_size=2)
    short, long = book.start([1, 2]), book.start([1, 2, 3, 4, 5])
    book.kv.publish(short, 2)
    book.kv.publish(long, 4)
    book.end(short, tail=False)
    book.extend(long, 6, 7)  # takes the block of `short`
    book.check(long)
    book.end(long)
    assert len(book.kv.match(Tokens(long.request, [], [1, 2, 3, 4, 5, 6, 9])).nodes) == 3


def test_beams_share_all_and_copy_what_they_write():
    book = Book()
    parent = book.start([1, 2, 3, 4, 5, 6])
    child = Tokens(parent.request, [], list(parent.token_ids))
    book.kv.fork(parent, child)
    assert child.block_table == parent.block_table
    child.token_ids.append(7)
    assert book.kv.num_new_blocks(child, 7) == 1
    assert book.compute(child, 7) == ([], True)
    book.check(parent, child)
    # The copy on its way reads what the parent doesn't write.
    assert book.kv.num_new_blocks(parent, 7) == 0
    assert book.extend(parent, 8) == ([], False)
    assert book.step() == [(BLOCK, 1, child.block_table[1])]
    book.check(parent, child)
    book.end(parent)
    book.end(child)
    assert book.kv.pool.num_free == 8


def test_who_holds_a_block_that_was_not_copied_is_lost():
    book = Book()
    book.run([1, 2, 3, 4, 5, 6, 7])
    other = book.start([1, 2, 3, 4, 5, 6, 9])
    book.step(failed=[0])
    assert book.lost == [other]
    book.end(other, Keep.FORGET)
    book.check()
    assert book.kv.pool.num_free == 8 and book.kv.stats.num_failed_copies == 1


def test_a_sequence_with_copies_on_their_way_is_not_forked():
    book = Book()
    book.run([1, 2, 3, 4, 5, 6, 7])
    other = book.start([1, 2, 3, 4, 5, 6, 9])
    with pytest.raises(IntegrityError, match="I4.*forked while its last block is copied"):
        book.kv.fork(other, Tokens(other.request, [], []))


def test_without_prefix_caching_only_the_request_itself_finds_its_blocks():
    book = Book(enable_prefix_caching=False)
    leader = book.start([1, 2, 3, 4, 5])
    book.kv.publish(leader, 5, tail=True)
    follower = book.start([1, 2, 3, 4, 5], request=leader.request)
    assert follower.hit == 4
    assert book.start([1, 2, 3, 4, 5]).hit == 0
    book.end(leader)
    book.end(follower)
    book.kv.end_request(leader.request)
    assert book.num_cached == 0 and book.kv.tree._roots == {}


# --- eviction --------------------------------------------------------------------------------


def test_an_evicted_block_is_copied_out_in_the_step_that_takes_it():
    book = Book(num_blocks=2, num_host_slots=2)
    book.run([1, 2, 3, 4, 5, 6, 7, 8])
    other = book.start([9, 9])
    assert other.block_table == [1]  # the leaf goes first
    match = book.kv.match(Tokens(other.request, [], [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert len(match.nodes) == 1  # not found before the copy is made
    assert book.step() == [(OUT, 1, 0)]
    match = book.kv.match(Tokens(other.request, [], [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert (len(match.nodes), match.num_device) == (2, 1)
    book.check(other)


def test_a_step_that_fails_loses_the_slot_and_nothing_else():
    book = Book(num_blocks=2, num_host_slots=2)
    book.run([1, 2, 3, 4, 5, 6, 7, 8])
    other = book.start([9, 9])
    book.step(error="broken")
    assert [node.block_id for node in book.kv.tree.nodes()] == [0]
    assert book.kv._tiers.slots.num_free == 2
    book.check(other)


def test_copies_beyond_the_budget_are_not_made():
    book = Book(num_blocks=3, num_host_slots=8, max_copies=1)
    book.run([1] * 12)
    book.start([2] * 12)
    assert len(book.step()) == 1


def test_what_was_given_up_is_not_copied_unless_somebody_used_it_since():
    book = Book(num_blocks=2, num_host_slots=2)
    first = book.start([1, 2, 3, 4, 5])
    book.end(first, Keep.GIVE_UP)
    book.end(book.start([9] * 8), Keep.GIVE_UP)
    assert book.step() == []
    book.run([9] * 8)
    book.start([3] * 8)
    assert [kind for kind, _, _ in book.step()] == [OUT, OUT]


def test_a_preempted_sequence_keeps_its_blocks_longest_and_finds_them_again():
    book = Book(num_blocks=5)
    swapped = book.start([1, 2, 3, 4, 5, 6])
    book.end(swapped, Keep.SWAP)
    book.run([7, 7, 7])
    book.run([8] * 8)
    assert book.kv.pool.num_pinned == book.kv.stats.num_pinned_blocks == 2
    book.check()
    book.resume(swapped)
    assert swapped.hit == 5
    book.step()
    book.end(swapped)
    assert book.kv.pool.num_pinned == 0
    book.check()


def test_a_preempted_sequence_survives_on_the_host():
    book = Book(num_blocks=2, num_host_slots=2)
    swapped = book.start([1, 2, 3, 4, 5, 6, 7])
    book.end(swapped, Keep.SWAP)
    other = book.start([9] * 8)
    assert [kind for kind, _, _ in book.step()] == [OUT, OUT]
    assert book.kv._tiers.slots.num_pinned == 2
    book.end(other)
    book.start([7] * 8)
    assert book.step() == []  # nothing unpinned may take the slots


def test_pins_outlive_what_they_pinned():
    book = Book(num_blocks=2)
    swapped = book.start([1, 2, 3, 4, 5, 6, 7, 8])
    book.end(swapped, Keep.SWAP)
    other = book.start([9] * 8)
    assert book.kv.tree.nodes() == []
    book.kv.unpin(swapped)
    book.kv.unpin(swapped)
    book.check(other)


# --- loading ---------------------------------------------------------------------------------


def on_host(num_blocks=4, **options):
    """[1..8] and a leaf of [9, 10] in slots, nothing on the device."""
    book = Book(num_blocks=num_blocks, num_host_slots=4, **options)
    book.run([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    other = book.start([0] * 4 * num_blocks)
    book.step()
    book.kv.publish(other, 0)
    book.kv.release(other, keep=Keep.FORGET)
    return book


QUERY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_prefix_comes_back_from_the_host():
    book = on_host()
    sequence = book.load(QUERY)
    assert book.kv.has_copies_to_make and book.kv.take_loaded() == []
    assert [kind for kind, _, _ in book.step()] == [IN, IN, IN]
    assert not book.kv.has_copies_to_make
    assert book.kv.take_loaded() == [sequence]
    assert book.kv.take_loaded() == []
    book.resume(sequence)
    assert sequence.hit == 10
    book.check(sequence)
    stats = book.kv.stats
    assert (stats.num_device_hit_tokens, stats.num_host_hit_tokens) == (0, 10)
    assert (stats.num_blocks_in, stats.num_blocks_out) == (3, 3)


def test_what_is_loaded_is_evicted_leaves_first():
    book = on_host()
    book.load(QUERY)
    book.step()
    book.kv.take_loaded()
    order = [book.kv.tree.blocks[block_id] for block_id in book.kv.pool.free_blocks()]
    assert [node.num_tokens for node in order if node] == [10, 8, 4]


def test_a_sequence_waits_once_then_takes_what_is_there():
    book = on_host()
    sequence = book.load(QUERY)
    book.step(failed=[1])
    assert book.kv.take_loaded() == [sequence]
    match = book.kv.match(sequence)
    assert match.num_device == 1
    assert not book.kv.load(sequence, match)
    book.resume(sequence)
    assert sequence.hit == 4
    book.check(sequence)


def test_two_that_wait_for_the_same_load_it_once():
    book = on_host()
    first, second = book.load(QUERY), book.load(QUERY)
    assert len(book.step()) == 3
    assert book.kv.take_loaded() == [first, second]


def test_who_ends_meanwhile_is_not_told():
    book = on_host()
    sequence = book.load(QUERY)
    book.kv.cancel_load(sequence)
    assert book.step() == [] and book.kv.take_loaded() == []
    assert book.kv._tiers.slots.num_free == 4
    book.check()


def test_what_was_computed_meanwhile_is_not_loaded():
    book = on_host()
    sequence = book.load([1, 2, 3, 4, 5])
    book.start([1, 2, 3, 4])
    computing = Tokens(make_request("x"), [], [1, 2, 3, 4, 9])
    book.compute(computing, 4)
    book.kv.publish(computing, 4)
    assert book.kv.take_loaded() == [sequence]
    assert IN not in [kind for kind, _, _ in book.step()]
    assert book.kv._tiers.slots.ref_counts.count(0) == 4


def test_loading_goes_on_in_later_steps():
    book = on_host()
    book.kv._copies._max_copies = book.kv._copies.num_left = 2
    sequence = book.load(QUERY[:9])
    while book.kv.has_copies_to_make:
        assert len(book.step()) <= 2
    assert book.kv.take_loaded() == [sequence]


def test_loading_waits_for_free_blocks():
    book = on_host()
    other = book.start([5] * 16)
    sequence = book.load(QUERY)
    assert not book.kv.has_copies_to_make and IN not in [kind for kind, _, _ in book.step()]
    book.end(other, tail=False)
    while book.kv.has_copies_to_make:
        book.step()
    assert book.kv.take_loaded() == [sequence]


# --- disk ------------------------------------------------------------------------------------


def stored(num_host_slots=4):
    """[1..8] on disk only; the records' ops."""
    book = Book(num_blocks=3, num_host_slots=num_host_slots, has_store=True)
    book.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert book.kv.has_copies_to_make
    writes = []
    while book.kv.has_copies_to_make or writes == []:
        book.step()
        for op in book.kv.take_store_ops():
            writes.append(op)
            assert op.is_write and op.block.record == -1 and book.kv.is_busy
            book.kv.on_store_result(StoreResult(op.number, True, len(writes) + 10))
    return book, writes


def test_full_blocks_are_written_parents_first():
    book, writes = stored()
    assert [op.block.token_ids for op in writes] == [
        pack_ints([1, 2, 3, 4]),
        pack_ints([5, 6, 7, 8]),
    ]
    assert writes[1].block.parent == writes[0].block.digest
    assert not book.kv.is_busy and book.kv.stats.num_store_writes == 2
    assert sorted(book.kv.tree.records) == [11, 12]
    book.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    book.step()
    assert book.kv.take_store_ops() == []  # they are there
    book.check()


def test_a_write_that_fails_is_tried_again_with_the_next_sequence():
    """As is one that was not tried, which is no failure."""
    book = Book(num_host_slots=4, has_store=True)
    for ok, record in ((False, -1), (True, -1), (True, 3)):
        book.run([1, 2, 3, 4, 5])
        book.step()
        (op,) = book.kv.take_store_ops()
        book.kv.on_store_result(StoreResult(op.number, ok, record))
        assert (book.kv.stats.num_store_failures, len(book.kv.tree.records)) == (1, record == 3)
    assert book.kv.stats.num_store_writes == 1


def restart(writes, num_host_slots=4):
    book = Book(num_blocks=4, num_host_slots=num_host_slots, has_store=True)
    book.kv.insert_stored(op.block._replace(record=i) for i, op in enumerate(writes))
    return book


def test_a_prefix_comes_back_from_disk():
    book = restart(stored()[1], num_host_slots=1)
    sequence = book.load([1, 2, 3, 4, 5, 6, 7, 8, 9])
    for record in range(2):  # through the one slot there is
        (op,) = book.kv.take_store_ops()
        assert (op.is_write, op.block.record, op.slot) == (False, record, 0)
        assert book.kv.take_store_ops() == [] and book.kv.is_busy
        book.check()
        book.kv.on_store_result(StoreResult(op.number, True))
        assert [kind for kind, _, _ in book.step()] == [IN]
    assert book.kv.take_loaded() == [sequence]
    book.resume(sequence)
    assert sequence.hit == 8
    assert book.kv.stats.num_disk_hit_tokens == 8 and book.kv.stats.num_store_reads == 2
    book.check(sequence)


def test_what_cannot_be_read_is_forgotten():
    book = restart(stored()[1])
    sequence = book.load([1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = book.kv.take_store_ops()
    book.kv.on_store_result(StoreResult(first.number, False))
    book.kv.on_store_result(StoreResult(second.number, True, dropped=(1,)))
    book.step()
    assert book.kv.take_loaded() == [sequence]
    assert book.kv.tree.records == {} and book.kv.match(sequence).nodes == []
    assert len(book.kv.tree.nodes()) == 2  # a hole, and what is behind it
    book.check()


def test_a_slot_is_pinned_while_it_is_the_only_place():
    book = Book(num_blocks=2, num_host_slots=4, has_store=True, max_session_blocks=4)
    end_in_session(book, [1, 2, 3, 4, 5, 6, 7, 8], "a")
    book.step()
    for record, op in enumerate(book.kv.take_store_ops()):
        book.kv.on_store_result(StoreResult(op.number, True, record))
    other = book.start([9] * 8)
    assert len(book.kv.tree.records) == book.kv.tree.num_cached_slots == 2
    slots = book.kv._tiers.slots
    assert slots.num_pinned == 0
    book.check(other)
    book.kv._tiers.forget_records([0, 1])
    assert slots.num_pinned == 2
    book.check(other)


def test_results_of_unknown_numbers_are_errors():
    book = Book(num_host_slots=1, has_store=True)
    with pytest.raises(IntegrityError, match="I4.*store op on its way, got 5"):
        book.kv.on_store_result(StoreResult(5, True))
    with pytest.raises(IntegrityError, match="I4.*copy on its way, got 6"):
        book.kv.acknowledge([], StepOutput(step_id=0, sampled=b"", copies_done=pack_ints([6])))


# --- sessions, size ----------------------------------------------------------------------------


def end_in_session(book, token_ids, session, now_s=0.0):
    sequence = book.start(token_ids, session=session)
    book.step()
    book.kv.publish(sequence, len(token_ids), tail=True)
    book.kv.keep_session(sequence.request, sequence, now_s)
    book.kv.release(sequence, keep=Keep.CACHE)


def test_a_session_keeps_its_prefix_until_it_expires():
    book = Book(num_blocks=4, max_session_blocks=4)
    end_in_session(book, [1, 2, 3, 4, 5, 6], "a")
    for token in (7, 8, 9):
        book.run([token] * 8)
    assert book.kv.match(Tokens(make_request(""), [], [1, 2, 3, 4, 5, 6, 7])).num_tail_tokens == 2
    assert book.kv.stats.num_sessions == 1 and book.kv.stats.num_pinned_blocks == 2
    book.check()
    book.kv.expire_sessions(1.9)
    assert book.kv.stats.num_sessions == 1
    book.kv.expire_sessions(2.0)
    assert book.kv.stats.num_sessions == 0 and book.kv.stats.num_pinned_blocks == 0
    book.check()


def test_a_session_goes_on_and_its_former_expiry_counts_no_more():
    book = Book(max_session_blocks=4)
    end_in_session(book, [1, 2, 3, 4, 5], "a", now_s=0.0)
    end_in_session(book, [1, 2, 3, 4, 5, 6, 7, 8, 9], "a", now_s=1.0)
    book.kv.expire_sessions(2.5)
    assert book.kv.stats.num_pinned_blocks == 3
    book.kv.expire_sessions(3.0)
    assert book.kv.stats.num_pinned_blocks == 0


def test_a_session_without_time_left_is_over():
    book = Book(max_session_blocks=4)
    end_in_session(book, [1, 2, 3, 4, 5], "a")
    sequence = book.start([1, 2, 3, 4, 5, 6], session="a")
    request = structs.replace(sequence.request, session_ttl_s=0.0)
    book.kv.keep_session(request, sequence, 1.0)
    book.end(sequence)
    book.kv.end_request(request)
    assert (book.kv.stats.num_sessions, book.kv.stats.num_pinned_blocks) == (0, 0)
    book.check()


def test_the_oldest_sessions_make_room_and_a_long_one_is_kept_in_part():
    book = Book(num_blocks=12, max_session_blocks=3)
    end_in_session(book, [1] * 8, "a")
    end_in_session(book, [2] * 4, "b")
    end_in_session(book, [3] * 8, "c")
    assert sorted(key[1] for key in book.kv._sessions._sessions) == ["b", "c"]
    end_in_session(book, [4] * 20, "d")
    assert book.kv.stats.num_sessions == 1 and book.kv.stats.num_pinned_blocks == 3
    book.check()


def test_many_turns_of_a_session_leave_no_heap_of_expiries():
    book = Book(max_session_blocks=4)
    for now_s in range(300):
        end_in_session(book, [1, 2, 3, 4], "a", now_s=float(now_s))
    assert len(book.kv._sessions._expiries) < 100


def test_a_smaller_pool_forgets_what_lay_beyond():
    book = Book(num_blocks=6)
    book.run([1, 2, 3, 4, 5, 6, 7, 8])
    held = book.start([9] * 8)
    assert max(held.block_table) >= 3
    book.kv.resize(1)
    book.check(held)
    assert book.kv.pool.num_blocks == 1 and book.num_cached == 1
    book.kv.publish(held, 8)
    book.end(held)
    assert book.kv.pool.num_free == 1 and book.kv.pool.num_held == 0
    book.kv.resize(4)
    assert book.kv.pool.num_free == 4
    book.run([1] * 16)
    book.check()


# --- checks ------------------------------------------------------------------------------------


def leak(book, sequence):
    book.kv.pool.take()


def hold_twice(book, sequence):
    sequence.block_table[1] = sequence.block_table[0]


def swap_blocks(book, sequence):
    sequence.block_table.reverse()


def pin_for_nobody(book, sequence):
    book.kv._tiers.pin(book.kv.tree.nodes())


def expect_a_copy(book, sequence):
    book.kv.tree.nodes()[0].num_users += 1


def compute_too_much(book, sequence):
    sequence.num_computed_tokens += 1


def have_too_many_blocks(book, sequence):
    sequence.num_computed_tokens -= 4


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (leak, "I1"),
        (hold_twice, "I6"),
        (swap_blocks, "I6"),
        (pin_for_nobody, "I6"),
        (expect_a_copy, "I6"),
        (compute_too_much, "I2"),
        (have_too_many_blocks, "I2"),
    ],
)
def test_damage_is_named(damage, invariant):
    book = Book()
    sequence = book.start([1, 2, 3, 4, 5, 6, 7, 8])
    book.kv.publish(sequence, 8)
    book.check(sequence)
    damage(book, sequence)
    with pytest.raises(IntegrityError, match=f"^{invariant}: "):
        book.check(sequence)


def test_unpublished_blocks_of_two_tables_hold_the_same_tokens():
    book = Book()
    parent = book.start([1, 2, 3, 4, 5, 6])
    child = Tokens(parent.request, [], list(parent.token_ids))
    book.kv.fork(parent, child)
    book.check(parent, child)
    child.token_ids[5] = 9
    with pytest.raises(IntegrityError, match="^I6: block 1 of"):
        book.check(parent, child)
