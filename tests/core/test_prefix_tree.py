import hashlib
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.core.integrity import IntegrityError
from streamkv.core.kv.prefix_node import num_common_tokens
from streamkv.core.kv.prefix_tree import PrefixTree
from streamkv.core.kv.sorted_keys import SortedKeys
from streamkv.protocol import StoredBlock, pack_ints


def publish(tree, token_ids, block_ids, salt=""):
    """Put these tokens into blocks, from the beginning; the last may be a part of one."""
    node, size = tree.root(salt), tree.block_size
    for index, block_id in enumerate(block_ids):
        node = tree.child(node, pack_ints(token_ids[index * size : (index + 1) * size]))
        if node.block_id < 0:
            tree.set_block(node, block_id)
    return node


def find(tree, token_ids, salt=""):
    return tree.match(array("i", token_ids), salt)


def cached_blocks(tree):
    return [block_id for block_id, node in enumerate(tree.blocks) if node is not None]


def evict(tree, block_id):
    node = tree.blocks[block_id]
    tree.clear_block(node)
    tree.prune(node)


def found(tree, token_ids, salt=""):
    """Blocks of full hits, block of the tail, tokens of it."""
    match = find(tree, token_ids, salt)
    tail = None if match.tail is None else match.tail.block_id
    return [node.block_id for node in match.nodes], tail, match.num_tail_tokens


def test_a_match_is_the_longest_prefix_of_full_blocks_and_part_of_the_next():
    tree = PrefixTree(2, num_blocks=200, num_slots=9)
    publish(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert found(tree, [1, 2, 3, 4, 9, 9, 9]) == ([10, 11], None, 0)
    assert found(tree, [1, 2, 3, 4, 5, 9, 9]) == ([10, 11], 12, 1)
    assert found(tree, [1, 2, 3, 9]) == ([10], 11, 1)
    assert found(tree, [1, 9, 3, 4]) == ([], 10, 1)
    assert found(tree, [9, 9, 3, 4]) == ([], None, 0)


def test_a_match_leaves_the_last_token_to_compute():
    tree = PrefixTree(2, num_blocks=200, num_slots=9)
    publish(tree, [1, 2, 3, 4], [10, 11])
    assert found(tree, [1, 2, 3, 4]) == ([10], 11, 1)
    assert found(tree, [1, 2, 3]) == ([10], None, 0)
    assert found(tree, [1, 2]) == ([], 10, 1)
    assert found(tree, [1]) == ([], None, 0)
    assert found(tree, [1, 2, 3, 4, 5]) == ([10, 11], None, 0)


def test_a_partial_leaf_matches_as_far_as_its_tokens_go():
    tree = PrefixTree(4, num_blocks=200, num_slots=9)
    publish(tree, [1, 2, 3, 4, 5, 6], [10, 11])
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([10], 11, 2)
    publish(tree, [1, 2, 3, 4, 5, 6, 7], [10, 12])
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == ([10], 12, 3)
    assert found(tree, [1, 2, 3, 4, 5, 6, 0, 0, 0])[1:] in ((11, 2), (12, 2))


def test_the_best_of_many_children_is_found():
    tree, rng = PrefixTree(8, num_blocks=1000, num_slots=9), random.Random(1)
    prompts = [[rng.randint(0, 2) for _ in range(8)] for _ in range(600)]
    for index, prompt in enumerate(prompts):
        publish(tree, prompt, [index])
    tree.check_integrity()
    for _ in range(100):
        query = [rng.randint(0, 2) for _ in range(8)]
        best = max(num_common_tokens(pack_ints(prompt), pack_ints(query[:7])) for prompt in prompts)
        assert find(tree, query).num_tail_tokens == best
    for block_id in cached_blocks(tree):
        evict(tree, block_id)
    tree.check_integrity()
    assert tree._roots == {}


def test_salts_share_nothing():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    publish(tree, [1, 2], [0, 1], "a")
    publish(tree, [1, 2], [2, 3], "b")
    assert found(tree, [1, 2, 3], "a")[0] == [0, 1]
    assert found(tree, [1, 2, 3], "b")[0] == [2, 3]
    assert found(tree, [1, 2, 3], "")[0] == []


def test_equal_tokens_at_another_place_are_another_prefix():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    publish(tree, [1, 1, 1], [0, 1, 2])
    assert found(tree, [1, 1, 1, 1])[0] == [0, 1, 2]
    assert len(cached_blocks(tree)) == 3


def test_what_is_on_another_tier_is_found_but_not_on_the_device():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2, 3], [0, 1, 2])
    tree.set_slot(node.parent, 7)
    evict(tree, 1)
    match = find(tree, [1, 2, 3, 4])
    assert (len(match.nodes), match.num_device, match.is_on_device) == (3, 1, False)
    tree.clear_slot(node.parent)
    tree.set_record(node.parent, 5)
    assert len(find(tree, [1, 2, 3, 4]).nodes) == 3


def test_only_a_long_tail_is_worth_loading():
    tree = PrefixTree(4, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2, 3, 4], [0])
    tree.set_slot(node, 7)
    evict(tree, 0)
    assert find(tree, [1, 9, 9]).tail is None
    assert find(tree, [1, 2, 9]).tail is node


def test_a_hole_ends_the_match_until_it_is_filled():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    publish(tree, [1, 2, 3], [0, 1, 2])
    evict(tree, 1)
    tree.check_integrity()
    assert found(tree, [1, 2, 3, 4]) == ([0], None, 0)
    publish(tree, [1, 2], [0, 9])
    assert found(tree, [1, 2, 3, 4])[0] == [0, 9, 2]


def test_holes_go_with_the_last_that_needs_them():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2, 3], [0, 1, 2], "tenant")
    evict(tree, 0)
    evict(tree, 1)
    assert len(tree.nodes()) == 3
    evict(tree, 2)
    tree.check_integrity()
    assert (tree.nodes(), tree._roots, node.is_attached) == ([], {}, False)


def test_a_node_to_which_a_copy_is_on_its_way_stays():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    node = publish(tree, [1], [0])
    node.num_users = 1
    evict(tree, 0)
    assert node.is_attached
    node.num_users = 0
    tree.prune(node)
    assert not node.is_attached


def test_a_root_is_dropped_with_all_below_it():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2], [0, 1], "request")
    tree.set_slot(node, 3)
    dropped = tree.drop_root("request")
    assert [n.block_id for n in dropped] == [0, 1]
    assert not any(n.is_attached for n in dropped)
    assert (tree.nodes(), cached_blocks(tree), tree.num_cached_slots) == ([], [], 0)
    assert tree.drop_root("request") == []
    tree.check_integrity()


def test_digests_are_of_salt_and_tokens():
    tree = PrefixTree(2, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2, 3, 4], [0, 1], "salt")

    def blake2b(data):
        return hashlib.blake2b(data, digest_size=32).digest()

    expected = blake2b(blake2b(blake2b(b"salt") + pack_ints([1, 2])) + pack_ints([3, 4]))
    assert node.digest == expected
    assert tree.prefix_of(1) == (blake2b(b"salt"), pack_ints([1, 2, 3, 4]))


def test_what_the_store_has_is_found_again_by_its_digests():
    tree = PrefixTree(2, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2, 3, 4], [0, 1], "salt")
    parent, root = node.parent, node.parent.parent
    stored = [
        StoredBlock(7, parent.digest, root.digest, parent.key),
        StoredBlock(8, node.digest, parent.digest, node.key),
        StoredBlock(9, b"x" * 32, b"of nobody", pack_ints([1, 2])),
        StoredBlock(10, b"y" * 32, b"too short", pack_ints([1])),
    ]
    other = PrefixTree(2, num_blocks=200, num_slots=9)
    other.insert_stored(stored)
    other.check_integrity()
    assert [n.record for n in find(other, [1, 2, 3, 4, 5], "salt").nodes] == [7, 8]
    assert sorted(other.records) == [7, 8, 9]
    tree.insert_stored(stored)
    tree.check_integrity()
    assert (parent.record, parent.block_id) == (7, 0)


def test_check_integrity_sees_damage():
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    node = publish(tree, [1, 2], [0, 1])
    node.slot = 3
    with pytest.raises(IntegrityError, match="I6: slots of nodes"):
        tree.check_integrity()
    node.slot = -1
    publish(tree, [1, 3], [0, 2])
    tree.check_integrity()
    node.key = pack_ints([7])
    with pytest.raises(IntegrityError, match="misplaced"):
        tree.check_integrity()


def test_common_tokens_are_counted_whole():
    assert num_common_tokens(pack_ints([1, 256, 3]), pack_ints([1, 257, 3])) == 1
    assert num_common_tokens(pack_ints([1, 2, 3]), pack_ints([1, 2])) == 2
    assert num_common_tokens(pack_ints([1]), pack_ints([2])) == 0


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(["", "x"]), TOKENS),
        st.tuples(st.just("evict"), st.just(""), st.integers(0, 30)),
    ),
    max_size=20,
)


@given(COMMANDS, TOKENS)
def test_the_tree_behaves_like_a_map_from_whole_prefixes(commands, query):
    tree = PrefixTree(1, num_blocks=200, num_slots=9)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    next_block = 0
    for command, salt, argument in commands:
        if command == "publish":
            publish(tree, argument, range(next_block, next_block + len(argument)), salt)
            for end in range(1, len(argument) + 1):
                known.setdefault((salt, tuple(argument[:end])), next_block + end - 1)
            next_block += len(argument)
        elif tree.blocks[argument] is not None:
            evict(tree, argument)
            del known[next(prefix for prefix, block in known.items() if block == argument)]
        tree.check_integrity()
        assert cached_blocks(tree) == sorted(known.values())
    expected = []
    for end in range(1, len(query)):
        if ("", tuple(query[:end])) not in known:
            break
        expected.append(known["", tuple(query[:end])])
    assert found(tree, query)[0] == expected


@given(st.lists(st.binary(min_size=1, max_size=3), unique=True), st.binary(max_size=3))
def test_sorted_keys_are_sorted(keys, query):
    some = SortedKeys(keys)
    assert list(some) == sorted(keys)
    near = some.around(query, 2)
    before = [key for key in sorted(keys) if key < query]
    after = [key for key in sorted(keys) if key >= query]
    assert sorted(near) == before[-2:] + after[:2]
    for key in keys:
        some.remove(key)
    assert list(some) == []


def test_sorted_keys_in_many_chunks():
    rng = random.Random(2)
    keys = list({rng.randbytes(4) for _ in range(5000)})
    some = SortedKeys(keys)
    assert len(some._chunks) > 5
    ordered = sorted(keys)
    assert list(some) == ordered
    for place in range(2, len(ordered) - 2, 7):
        assert sorted(some.around(ordered[place], 2)) == ordered[place - 2 : place + 2]
    for key in keys:
        some.remove(key)
    assert (list(some), some._chunks, some.around(b"x", 2)) == ([], [], [])
