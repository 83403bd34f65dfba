"""Who owns which KV cache block: sharing, copy-on-write, rollback, and finding known prefixes again.

Knows block numbers and token ids. The tensors live in the backend, which is asked only to copy a block. A sequence's
block table is a plain list of block numbers: position p is in block `table[p // block_size]`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from paceline.errors import CapacityError


def _root(salt: str | None) -> int | str:
    """What stands for the empty prefix: content numbers begin at 1, so neither 0 nor a text is one."""
    return 0 if salt is None else salt


class OutOfBlocks(CapacityError):
    """No block is free or evictable. Raised before anything was changed; the scheduler queues or preempts."""


class KVCache:
    """`num_blocks` blocks of `block_size` tokens.

    A block is in exactly one of three states: *held* by one or more tables, *evictable* (held by none, but its content
    can still be found; the least recently held goes first), or *free*.

    Published content is identified exactly, without hashing collisions: content number = the number given to the pair
    (content number of the prefix before the block, the block's token ids). Equal numbers therefore mean equal tokens
    from position 0 on. Numbers are never reused, so a block whose predecessor was evicted can no longer be found. A
    `salt` takes the place of the empty prefix: what was published under one salt is found under no other.
    """

    def __init__(
        self, num_blocks: int, block_size: int, copy_block: Callable[[int, int], None], enable_prefix_cache: bool = True
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._copy_block = copy_block
        self._enable_prefix_cache = enable_prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._num_holders = [0] * num_blocks
        self._content: list[int | None] = [None] * num_blocks  # content number of a published block
        self._key: dict[int, tuple[int | str, tuple[int, ...]]] = {}  # findable block -> its key
        self._findable: dict[tuple[int | str, tuple[int, ...]], int] = {}  # the reverse
        self._last_content = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that `grow` can take: free or evictable."""
        return len(self._free) + len(self._evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: SequenceOf[int], salt: str | None = None) -> tuple[list[int], int]:
        """Hold the longest chain of published blocks that `token_ids` starts with: (block table, number of tokens).

        At least one token is left out, since its logits will be wanted.
        """
        table: list[int] = []
        if self._enable_prefix_cache:
            content, size = _root(salt), self.block_size
            for start in range(0, len(token_ids) - size, size):
                block = self._findable.get((content, tuple(token_ids[start : start + size])))
                if block is None:
                    break
                content = self._content[block]
                self._hold(block)
                table.append(block)
        return table, len(table) * self.block_size

    def grow(self, block_table: list[int], num_tokens: int, first_write: int) -> None:
        """Make room for `num_tokens` tokens, of which those from position `first_write` on may be written.

        Blocks to be written that other tables hold too are replaced by copies; published ones are no longer findable,
        as their content is about to change. Raises OutOfBlocks, having changed nothing.
        """
        num_missing = self.num_blocks_for(num_tokens) - len(block_table)
        first_block = first_write // self.block_size
        shared = [i for i in range(first_block, len(block_table)) if self._num_holders[block_table[i]] > 1]
        num_wanted = max(num_missing, 0) + len(shared)
        if num_wanted > self.num_available_blocks:
            raise OutOfBlocks(
                f"the KV cache needs {num_wanted} more blocks, has {self.num_available_blocks} of {self.num_blocks}.",
                "wait for other requests to finish, or build with more KV cache memory",
            )
        for i in range(first_block, len(block_table)):
            if self._content[block_table[i]] is not None and self._num_holders[block_table[i]] == 1:
                self._forget(block_table[i])
        for i in shared:
            copy = self._allocate()
            self._copy_block(block_table[i], copy)
            self._drop(block_table[i])
            block_table[i] = copy
        for _ in range(num_missing):
            block_table.append(self._allocate())

    def publish(
        self,
        block_table: SequenceOf[int],
        token_ids: SequenceOf[int],
        num_computed_tokens: int,
        salt: str | None = None,
    ) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens findable. Costs O(new full blocks).

        Where another block already has the same content, that one stays the findable one.
        """
        if not self._enable_prefix_cache:
            return
        num_full = first = num_computed_tokens // self.block_size
        while first > 0 and self._content[block_table[first - 1]] is None:
            first -= 1
        content = self._content[block_table[first - 1]] if first > 0 else _root(salt)
        for index in range(first, num_full):
            start = index * self.block_size
            key = (content, tuple(token_ids[start : start + self.block_size]))
            block, known = block_table[index], self._findable.get(key)
            if known is None:
                self._last_content += 1
                self._content[block] = self._last_content
                self._key[block], self._findable[key] = key, block
            else:
                self._content[block] = self._content[known]
            content = self._content[block]

    def truncate(self, block_table: list[int], num_tokens: int) -> None:
        """Let go of the blocks past the first `num_tokens` tokens. Nothing is written: rollback costs nothing else."""
        num_kept = self.num_blocks_for(num_tokens)
        while len(block_table) > num_kept:
            self._drop(block_table.pop())

    def fork(self, block_table: SequenceOf[int]) -> list[int]:
        """A table that shares all blocks; whichever side writes first gets copies."""
        for block in block_table:
            self._hold(block)
        return list(block_table)

    def release(self, block_table: list[int]) -> None:
        """Let go of everything, the end first, so that a prefix outlives what builds on it. Empties the table."""
        self.truncate(block_table, 0)

    def check(self, tables: Iterable[SequenceOf[int]]) -> None:
        """AssertionError unless the books balance, `tables` being all tables in use."""
        holders = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        for block in range(self.num_blocks):
            assert self._num_holders[block] == holders[block], (
                f"block {block} has {holders[block]} holders, {self._num_holders[block]} on the books"
            )
            states = (holders[block] > 0) + (block in self._evictable) + free[block]
            assert states == 1, f"block {block} is in {states} of the states held, evictable and free"
            if block in self._evictable:
                assert block in self._key, f"block {block} is kept though it cannot be found"
            if holders[block] == 0 and block not in self._evictable:
                assert self._content[block] is None, f"free block {block} still has content"
        assert {block: key for key, block in self._findable.items()} == self._key, "the prefix index disagrees"

    def _allocate(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        self._num_holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            del self._evictable[block]
        self._num_holders[block] += 1

    def _drop(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if block in self._key:
                self._evictable[block] = None
            else:
                self._content[block] = None  # a duplicate of a findable block, or never published
                self._free.append(block)

    def _forget(self, block: int) -> None:
        """The block's content is no longer what was published."""
        self._content[block] = None
        key = self._key.pop(block, None)
        if key is not None:
            del self._findable[key]
