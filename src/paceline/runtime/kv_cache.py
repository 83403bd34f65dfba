"""Who owns which block of a paged KV cache: sharing, copy-on-write, rollback, and the prefix cache.

Knows block numbers and token ids. The tensors live in a backend; all this module ever asks of one is to copy a block.
Knows nothing of sequences or scheduling.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from paceline.errors import CapacityError

_Key = tuple[int, tuple[int, ...]]  # content number of the block before (0: none), token ids of the block
_UNPUBLISHED = 0


class OutOfBlocks(CapacityError):
    """Fewer blocks are available than a growing sequence needs. A scheduler's affair: no user ever sees it."""


class KVCache:
    """Bookkeeping for `num_blocks` blocks of `block_size` tokens.

    A *block table* is a list of block numbers, owned by the caller and changed only here: token i of its sequence is in
    block_table[i // block_size]. Blocks may be in several tables. A block that is full and computed can be *published*:
    it is then found by later sequences that begin with the same tokens, even after its last owner has gone, until
    the space is needed (least recently used first).

    What is published is numbered. A block is found by the number of the block before it and its own token ids, so a
    match is exact, with no hash to collide, and equal prefixes are stored once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        copy_block: Callable[[int, int], None],
        enable_prefix_cache: bool = True,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._copy_block = copy_block
        self._enable_prefix_cache = enable_prefix_cache
        self._num_owners = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # unowned and unpublished
        self._evictable: OrderedDict[int, None] = OrderedDict()  # unowned but published, least recently used first
        self._content = [_UNPUBLISHED] * num_blocks  # the number of what is published in each block
        self._key_of: dict[int, _Key] = {}  # of each published block
        self._published: dict[_Key, int] = {}
        self._num_contents = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out, those of the prefix cache nobody uses included."""
        return len(self._blank) + len(self._evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: SequenceOf[int]) -> tuple[list[int], int]:
        """A block table of the longest published beginning of `token_ids`, and how many tokens it holds.

        At least one token is left to compute, since somebody wants its logits. The caller owns the table.
        """
        block_table: list[int] = []
        if not self._enable_prefix_cache:
            return block_table, 0
        size, content = self.block_size, _UNPUBLISHED
        for end in range(size, len(token_ids), size):
            block = self._published.get((content, tuple(token_ids[end - size : end])))
            if block is None:
                break
            content = self._content[block]
            self._acquire(block)
            block_table.append(block)
        return block_table, len(block_table) * size

    def num_blocks_to_grow(self, block_table: SequenceOf[int], num_tokens: int, first_write: int) -> int:
        """How many available blocks `grow` with the same arguments would take."""
        written = block_table[first_write // self.block_size :]
        num_copies = sum(1 for block in written if self._num_owners[block] > 1)
        return num_copies + max(0, self.num_blocks_for(num_tokens) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int, first_write: int) -> None:
        """Make room for `num_tokens` tokens, of which those from position `first_write` on may be written.

        Blocks to be written that have other owners are replaced by copies, and published ones are published no longer.
        Raises OutOfBlocks, with nothing changed, if there are too few.
        """
        num_needed = self.num_blocks_to_grow(block_table, num_tokens, first_write)
        if num_needed > self.num_available_blocks:
            raise OutOfBlocks(f"the KV cache has {self.num_available_blocks} blocks available of {num_needed} needed")
        for index in range(first_write // self.block_size, len(block_table)):
            block = block_table[index]
            if self._num_owners[block] > 1:
                block_table[index] = self._allocate()
                self._copy_block(block, block_table[index])
                self._drop(block)
            elif self._content[block] != _UNPUBLISHED:
                self._unpublish(block)
        while len(block_table) * self.block_size < num_tokens:
            block_table.append(self._allocate())

    def publish(self, block_table: list[int], token_ids: SequenceOf[int], num_computed_tokens: int) -> None:
        """Let others find the full blocks among the first `num_computed_tokens` tokens, whose ids are `token_ids`.

        Where the same content is published already, the table takes that block and gives its own back. Published blocks
        are always the first ones of a table, so only new ones are looked at.
        """
        if not self._enable_prefix_cache:
            return
        size = self.block_size
        num_full = num_computed_tokens // size
        first = num_full
        while first > 0 and self._content[block_table[first - 1]] == _UNPUBLISHED:
            first -= 1
        for index in range(first, num_full):
            before = self._content[block_table[index - 1]] if index else _UNPUBLISHED
            key = (before, tuple(token_ids[index * size : (index + 1) * size]))
            block, twin = block_table[index], self._published.get(key)
            if twin is not None:
                self._acquire(twin)
                block_table[index] = twin
                self._drop(block)
                continue
            self._num_contents += 1
            self._content[block] = self._num_contents
            self._key_of[block] = key
            self._published[key] = block

    def truncate(self, block_table: list[int], num_tokens: int) -> None:
        """Give back the blocks past the first `num_tokens` tokens (rollback)."""
        num_kept = self.num_blocks_for(num_tokens)
        while len(block_table) > num_kept:  # last first: the end of a prefix is evicted before its beginning
            self._drop(block_table.pop())

    def fork(self, block_table: SequenceOf[int]) -> list[int]:
        """Another table of the same blocks. Whoever writes to one of them first, in `grow`, gets a copy."""
        for block in block_table:
            self._acquire(block)
        return list(block_table)

    def release(self, block_table: list[int]) -> None:
        """Give all blocks back and empty the table. Published ones can still be found until they are evicted."""
        self.truncate(block_table, 0)

    def check(self, block_tables: Iterable[SequenceOf[int]]) -> None:
        """Raise AssertionError unless `block_tables` are all there are and every block is accounted for."""
        owners = Counter(block for table in block_tables for block in table)
        assert self._num_owners == [owners[block] for block in range(self.num_blocks)], "owners miscounted"
        unowned = [*self._blank, *self._evictable]
        assert len(unowned) == len(set(unowned)), "a block is available twice"
        assert set(unowned) == {block for block in range(self.num_blocks) if not owners[block]}, "a block leaked"
        published = {block for block in range(self.num_blocks) if self._content[block] != _UNPUBLISHED}
        assert published == set(self._key_of) == set(self._published.values()), "the prefix cache has stale entries"
        assert all(self._published[key] == block for block, key in self._key_of.items()), "a block is published twice"
        assert published >= set(self._evictable) and not published & set(self._blank), "a blank block is published"

    def _allocate(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._unpublish(block)
        self._num_owners[block] = 1
        return block

    def _acquire(self, block: int) -> None:
        if self._num_owners[block] == 0:
            del self._evictable[block]
        self._num_owners[block] += 1

    def _drop(self, block: int) -> None:
        self._num_owners[block] -= 1
        if self._num_owners[block] > 0:
            return
        if self._content[block] == _UNPUBLISHED:
            self._blank.append(block)
        else:
            self._evictable[block] = None

    def _unpublish(self, block: int) -> None:
        """What was published after this block is found no more, since its number is never given out again."""
        del self._published[self._key_of.pop(block)]
        self._content[block] = _UNPUBLISHED
