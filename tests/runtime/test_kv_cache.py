from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.runtime.kv_cache import KVCache, OutOfBlocks

SIZE = 4


class Tensors:
    """What a backend stores: in each slot, all tokens up to the one it was computed for."""

    def __init__(self, num_blocks: int):
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * SIZE)
        self.copies: list[tuple[int, int]] = []

    def copy_block(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))
        self.slots[destination * SIZE : (destination + 1) * SIZE] = self.slots[source * SIZE : (source + 1) * SIZE]

    def write(self, table: list[int], token_ids: list[int], first: int) -> None:
        for position in range(first, len(token_ids)):
            self.slots[table[position // SIZE] * SIZE + position % SIZE] = tuple(token_ids[: position + 1])

    def read(self, table: list[int], position: int) -> tuple[int, ...] | None:
        return self.slots[table[position // SIZE] * SIZE + position % SIZE]


def make_cache(num_blocks: int, enable_prefix_cache: bool = True) -> tuple[KVCache, Tensors]:
    tensors = Tensors(num_blocks)
    return KVCache(num_blocks, SIZE, tensors.copy_block, enable_prefix_cache), tensors


def compute(cache: KVCache, tensors: Tensors, token_ids: list[int], table=None, num_computed: int = 0) -> list[int]:
    """Grow, write and publish, as a step does."""
    table = [] if table is None else table
    cache.grow(table, len(token_ids), num_computed)
    tensors.write(table, token_ids, num_computed)
    cache.publish(table, token_ids, len(token_ids))
    return table


class Machine(RuleBasedStateMachine):
    """Any interleaving of what sequences do. However blocks are shared, copied, evicted and reused, each table must
    read back exactly what was computed for it, and the books must balance."""

    NUM_BLOCKS = 7
    PREFIX_CACHE = True

    def __init__(self):
        super().__init__()
        self.cache, self.tensors = make_cache(self.NUM_BLOCKS, self.PREFIX_CACHE)
        self.live: list[tuple[list[int], list[int]]] = []  # block table, computed token ids

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=13)  # few distinct ones: prefixes are often shared
    pick = st.integers(0, 1000)

    def chosen(self, pick: int) -> tuple[list[int], list[int]]:
        return self.live[pick % len(self.live)]

    @rule(token_ids=tokens)
    def arrive(self, token_ids):
        table, num_cached = self.cache.match_prefix(token_ids)
        assert num_cached % SIZE == 0 and num_cached < len(token_ids)
        assert len(table) == num_cached // SIZE
        if not self.PREFIX_CACHE:
            assert num_cached == 0
        self.live.append((table, token_ids[:num_cached]))

    @precondition(lambda self: self.live)
    @rule(pick=pick, more=tokens)
    def extend(self, pick, more):
        table, computed = self.chosen(pick)
        before, available, slots = list(table), self.cache.num_available_blocks, list(self.tensors.slots)
        try:
            self.cache.grow(table, len(computed) + len(more), len(computed))
        except OutOfBlocks:
            assert (table, self.cache.num_available_blocks, self.tensors.slots) == (before, available, slots)
            shared = sum(other is not table and bool(set(other) & set(table)) for other, _ in self.live)
            needed = -(-(len(computed) + len(more)) // SIZE) - len(table)
            assert needed + (1 if shared else 0) > available
            return
        assert len(table) * SIZE >= len(computed) + len(more)
        written = set(table[len(computed) // SIZE :])
        for other, _ in self.live:
            assert other is table or not written & set(other), "a shared block is about to be written"
        computed += more
        self.tensors.write(table, computed, len(computed) - len(more))

    @precondition(lambda self: self.live)
    @rule(pick=pick, fraction=st.floats(0, 1))
    def publish(self, pick, fraction):
        table, computed = self.chosen(pick)
        self.cache.publish(table, computed, int(fraction * len(computed)))

    @precondition(lambda self: self.live)
    @rule(pick=pick, fraction=st.floats(0, 1))
    def truncate(self, pick, fraction):
        table, computed = self.chosen(pick)
        del computed[int(fraction * len(computed)) :]
        self.cache.truncate(table, len(computed))
        assert len(table) == -(-len(computed) // SIZE)

    @precondition(lambda self: self.live)
    @rule(pick=pick)
    def fork(self, pick):
        table, computed = self.chosen(pick)
        self.live.append((self.cache.fork(table), list(computed)))

    @precondition(lambda self: self.live)
    @rule(pick=pick)
    def release(self, pick):
        table, _ = self.live.pop(pick % len(self.live))
        self.cache.release(table)
        assert table == []

    @invariant()
    def every_table_reads_what_was_computed_for_it(self):
        for table, computed in self.live:
            for position in range(len(computed)):
                assert self.tensors.read(table, position) == tuple(computed[: position + 1])

    @invariant()
    def books_balance(self):
        self.cache.check([table for table, _ in self.live])

    def teardown(self):
        for table, _ in self.live:
            self.cache.release(table)
        self.cache.check([])
        assert self.cache.num_available_blocks == self.NUM_BLOCKS


class MachineWithoutPrefixCache(Machine):
    PREFIX_CACHE = False


for machine in (Machine, MachineWithoutPrefixCache):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
TestMachineWithoutPrefixCache = MachineWithoutPrefixCache.TestCase


class TestPrefix:
    def test_the_longest_chain_of_full_blocks_is_found_again_after_release(self):
        cache, tensors = make_cache(8)
        token_ids = list(range(10))
        table = compute(cache, tensors, token_ids)
        first_two = table[:2]
        cache.release(table)
        assert cache.match_prefix([*token_ids, 99]) == (first_two, 8)
        assert cache.match_prefix([0, 1, 2, 3, 9, 9, 9, 9, 9]) == (first_two[:1], 4)
        assert cache.match_prefix([9, *token_ids]) == ([], 0)

    def test_one_token_is_always_left_to_compute(self):
        cache, tensors = make_cache(8)
        compute(cache, tensors, list(range(8)))
        assert cache.match_prefix(list(range(8)))[1] == 4
        assert cache.match_prefix(list(range(9)))[1] == 8
        assert cache.match_prefix([])[1] == 0

    def test_equal_blocks_after_different_ones_are_not_confused(self):
        cache, tensors = make_cache(8)
        compute(cache, tensors, [1, 1, 1, 1, 5, 5, 5, 5])
        compute(cache, tensors, [2, 2, 2, 2, 6, 6, 6, 6])
        assert cache.match_prefix([2, 2, 2, 2, 5, 5, 5, 5, 0])[1] == 4

    def test_what_follows_a_prefix_computed_twice_at_once_is_found(self):
        cache, tensors = make_cache(8)
        token_ids = list(range(12))
        tables: list[list[int]] = [[], []]
        for table in tables:
            cache.grow(table, 8, 0)
            tensors.write(table, token_ids[:8], 0)
        for table in tables:
            cache.publish(table, token_ids, 8)
        compute(cache, tensors, token_ids, tables[1], 8)
        assert cache.match_prefix([*token_ids, 99])[1] == 12

    def test_what_is_not_published_is_not_found(self):
        cache, tensors = make_cache(8)
        table: list[int] = []
        cache.grow(table, 8, 0)
        tensors.write(table, list(range(8)), 0)
        assert cache.match_prefix(list(range(9)))[1] == 0
        cache.publish(table, list(range(8)), 7)
        assert cache.match_prefix(list(range(9)))[1] == 4

    def test_the_least_recently_used_prefix_is_evicted_and_its_end_before_its_beginning(self):
        cache, tensors = make_cache(4)
        for start in (10, 20):
            table = compute(cache, tensors, list(range(start, start + 8)))
            cache.release(table)
        held, found = cache.match_prefix([*range(10, 18), 0])  # used again: now 20.. is the oldest
        assert found == 8
        cache.release(held)
        one: list[int] = []
        cache.grow(one, 1, 0)
        assert cache.match_prefix([*range(20, 28), 0])[1] == 4
        assert cache.match_prefix([*range(10, 18), 0])[1] == 8

    def test_a_block_in_use_is_never_evicted(self):
        cache, tensors = make_cache(3)
        compute(cache, tensors, list(range(8)))
        cache.grow([], 4, 0)
        with pytest.raises(OutOfBlocks):
            cache.grow([], 1, 0)

    def test_publishing_looks_at_new_blocks_only(self):
        cache, _ = make_cache(64)

        class Counting(list):
            read = 0

            def __getitem__(self, index):
                Counting.read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
                return super().__getitem__(index)

        token_ids = Counting(range(250))
        table: list[int] = []
        cache.grow(table, 250, 0)
        for num_computed in range(1, 251):
            cache.publish(table, token_ids, num_computed)
        assert 248 <= Counting.read <= 2 * 250


class TestCopyOnWrite:
    def test_only_the_written_block_is_copied_and_only_while_shared(self):
        cache, tensors = make_cache(8)
        table = compute(cache, tensors, list(range(6)))
        twin = cache.fork(table)
        compute(cache, tensors, [*range(6), 70], twin, 6)
        assert tensors.copies == [(table[1], twin[1])]
        assert twin[0] == table[0]
        compute(cache, tensors, [*range(6), 80], table, 6)
        assert len(tensors.copies) == 1
        assert tensors.read(twin, 6) == (*range(6), 70)
        assert tensors.read(table, 6) == (*range(6), 80)

    def test_too_few_blocks_for_the_copy_change_nothing(self):
        cache, tensors = make_cache(2)
        table = compute(cache, tensors, list(range(6)))
        twin = cache.fork(table)
        with pytest.raises(OutOfBlocks):
            cache.grow(twin, 7, 6)
        assert twin == table and not tensors.copies
        cache.check([table, twin])

    def test_rewriting_a_published_block_makes_it_unfindable(self):
        cache, tensors = make_cache(4)
        table = compute(cache, tensors, list(range(8)))
        cache.truncate(table, 6)
        cache.grow(table, 8, 6)
        assert cache.match_prefix([*range(8), 0])[1] == 4


class TestCheck:
    def test_notices_a_leak_and_a_double_owner(self):
        cache, _ = make_cache(4)
        table: list[int] = []
        cache.grow(table, 5, 0)
        cache.check([table])
        for wrong in ([], [table[:1]], [table, table]):
            with pytest.raises(AssertionError):
                cache.check(wrong)


def test_what_was_published_under_a_salt_is_found_under_it_alone():
    cache, _ = make_cache(20)
    tokens, tables = list(range(13)), {}
    for salt in (None, "a"):
        table: list[int] = []
        cache.grow(table, 13, 0)
        cache.publish(table, tokens, 13, salt)
        tables[salt] = table
    for salt, table in ((None, tables[None]), ("a", tables["a"])):
        found, number = cache.match_prefix(tokens, salt)
        assert (found, number) == (table[:3], 12)
        cache.release(found)
    assert cache.match_prefix(tokens, "b") == ([], 0) and cache.match_prefix(tokens, "") == ([], 0)
    cache.check([tables[None], tables["a"]])
