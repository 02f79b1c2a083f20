from hypothesis import given
from hypothesis import strategies as st

from streamkv.core.prefix_tree import PrefixTree


def publish(tree, token_ids, block_ids, cache_salt=""):
    """Publish the full blocks of these tokens from the beginning."""
    node = None
    size = tree.block_size
    for index, block_id in enumerate(block_ids):
        tokens = token_ids[index * size : (index + 1) * size]
        node = tree.publish(node, cache_salt, tokens, block_id)
    return node


def test_a_match_is_the_longest_published_prefix_of_full_blocks():
    tree = PrefixTree(2)
    publish(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.match([1, 2, 3, 4, 9, 9, 9], "").block_ids == [10, 11]
    assert tree.match([1, 2, 3], "").block_ids == [10]
    assert tree.match([1, 9, 3, 4], "").block_ids == []
    assert tree.match([1, 9, 3, 4], "").node is None


def test_a_match_leaves_the_last_token_to_compute():
    tree = PrefixTree(2)
    publish(tree, [1, 2, 3, 4], [10, 11])
    assert tree.match([1, 2, 3, 4], "").block_ids == [10]
    assert tree.match([1, 2], "").block_ids == []
    assert tree.match([1, 2, 3, 4, 5], "").block_ids == [10, 11]


def test_salts_share_nothing():
    tree = PrefixTree(1)
    publish(tree, [1, 2], [0, 1], "a")
    publish(tree, [1, 2], [2, 3], "b")
    assert tree.match([1, 2, 3], "a").block_ids == [0, 1]
    assert tree.match([1, 2, 3], "b").block_ids == [2, 3]
    assert tree.match([1, 2, 3], "").block_ids == []


def test_equal_tokens_at_another_place_are_another_prefix():
    tree = PrefixTree(1)
    publish(tree, [1, 1, 1], [0, 1, 2])
    assert tree.match([1, 1, 1, 1], "").block_ids == [0, 1, 2]
    assert len(tree) == 3


def test_what_is_published_first_stays_the_shared_block():
    tree = PrefixTree(2)
    first = publish(tree, [1, 2], [10])
    second = publish(tree, [1, 2], [20])
    assert first is second
    assert 20 not in tree
    assert tree.match([1, 2, 3], "").block_ids == [10]


def test_evicting_a_block_takes_what_goes_on_from_it_out_too():
    tree = PrefixTree(1)
    publish(tree, [1, 2, 3], [0, 1, 2])
    publish(tree, [1, 7], [0, 3])
    tree.evict(1)
    tree.check_integrity()
    assert [block_id in tree for block_id in range(4)] == [True, False, False, True]
    assert tree.match([1, 2, 3, 4], "").block_ids == [0]


def test_a_salt_without_blocks_leaves_nothing_behind():
    tree = PrefixTree(1)
    publish(tree, [1, 2], [0, 1], "tenant")
    tree.evict(0)
    tree.evict(0)
    tree.check_integrity()
    assert len(tree) == 0
    assert tree._roots == {}


def test_an_evicted_node_is_recognisable_to_who_still_has_it():
    tree = PrefixTree(1)
    node = publish(tree, [1, 2], [0, 1])
    assert node.parent is not None
    tree.evict(0)
    assert node.parent is None


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
    tree = PrefixTree(1)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    next_block = 0
    for command, salt, argument in commands:
        if command == "publish":
            publish(tree, argument, range(next_block, next_block + len(argument)), salt)
            for end in range(1, len(argument) + 1):
                known.setdefault((salt, tuple(argument[:end])), next_block + end - 1)
            next_block += len(argument)
        else:
            tree.evict(argument)
            gone = [prefix for prefix, block_id in known.items() if block_id == argument]
            for salt_, prefix in gone:
                for other in list(known):
                    if other[0] == salt_ and other[1][: len(prefix)] == prefix:
                        del known[other]
        tree.check_integrity()
        assert {b for b in range(next_block) if b in tree} == set(known.values())
    expected = []
    for end in range(1, len(query)):
        if ("", tuple(query[:end])) not in known:
            break
        expected.append(known["", tuple(query[:end])])
    assert tree.match(query, "").block_ids == expected
