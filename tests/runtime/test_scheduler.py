from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.scheduler import Scheduler, Turn, num_missing, total_tokens
from paceline.runtime.sequence import FinishReason, Request, Sequence

SIZE = 4


def make_sequence(name: str, num_prompt: int, max_tokens: int, priority: int = 0, first_token: int = 0) -> Sequence:
    prompt = tuple(range(first_token, first_token + num_prompt))
    return Sequence(Request(name, prompt, SamplingParams(max_tokens=max_tokens), priority=priority))


@dataclass
class World:
    """A scheduler with an engine around it that has no model: every step's promises are checked and kept."""

    num_blocks: int = 32
    row_budget: int = 8
    max_batch_size: int = 4
    total_token_limit: int | None = None
    chunked: bool = True
    guaranteed: bool = True
    prefix_cache: bool = True
    preempted: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = KVCache(self.num_blocks, SIZE, lambda source, destination: None, self.prefix_cache)
        self.scheduler = Scheduler(
            self.cache,
            row_budget=self.row_budget,
            max_batch_size=self.max_batch_size,
            total_token_limit=self.total_token_limit,
            enable_chunked_prefill=self.chunked,
            guaranteed_no_evict=self.guaranteed,
            on_preempt=self.preempted.append,
        )

    def step(self, wish: int = 0, accept: int = 0) -> list[Turn]:
        """Draft up to `wish` tokens per decoding sequence within what is offered; `accept` of each are accepted."""
        scheduler, cache = self.scheduler, self.cache
        decoding, draft_rows = scheduler.schedule()
        assert all(num_missing(sequence) == 1 for sequence in decoding)
        assert 0 <= draft_rows <= self.row_budget - len(decoding)
        drafts = []
        for _ in decoding:
            drafts.append(Draft([7] * min(wish, draft_rows), torch.ones(min(wish, draft_rows), 3) / 3, "draft"))
            draft_rows -= len(drafts[-1])
        turns = scheduler.allot(decoding, drafts)
        self.check(turns)
        if self.chunked:
            with_turn = {turn.sequence for turn in turns}
            assert all(sequence in with_turn for sequence in decoding if sequence in scheduler.running)
        for turn in turns:
            self.commit(turn, accept)
        cache.check([sequence.block_table for sequence in scheduler.running])
        return turns

    def check(self, turns: list[Turn]) -> None:
        running = self.scheduler.running
        assert sum(turn.num_rows for turn in turns) <= self.row_budget
        assert len(running) <= self.max_batch_size
        if self.total_token_limit is not None:
            assert sum(map(total_tokens, running)) <= self.total_token_limit
        assert len({turn.sequence for turn in turns}) == len(turns)
        for turn in turns:
            sequence = turn.sequence
            assert sequence in running
            assert 1 <= turn.num_known <= num_missing(sequence)
            assert turn.yields_token == (turn.num_known == num_missing(sequence))
            assert not len(turn.draft) or turn.yields_token
            if turn.draft.probabilities is not None:
                assert len(turn.draft.probabilities) == len(turn.draft)
            last = sequence.num_computed_tokens + turn.num_rows
            assert last < total_tokens(sequence) or not len(turn.draft)
            assert len(sequence.block_table) * SIZE >= last
            written = set(sequence.block_table[sequence.num_computed_tokens // SIZE :])
            others = (other for other in running if other is not sequence)
            assert not any(written & set(other.block_table) for other in others), "a shared block is written"

    def commit(self, turn: Turn, accept: int) -> None:
        sequence = turn.sequence
        sequence.num_computed_tokens += turn.num_known
        if not turn.yields_token:
            self.cache.publish(sequence.block_table, sequence.token_ids, sequence.num_computed_tokens)
        else:
            num_new = min(accept, len(turn.draft)) + 1
            sequence.token_ids += [len(sequence.token_ids) + i for i in range(num_new)]
            sequence.num_computed_tokens += num_new - 1
            self.cache.publish(sequence.block_table, sequence.token_ids, sequence.num_computed_tokens)
            self.cache.truncate(sequence.block_table, sequence.num_computed_tokens)
        if len(sequence.token_ids) >= total_tokens(sequence):
            assert len(sequence.token_ids) == total_tokens(sequence), "more rows than output left to fill"
            sequence.finish_reason = FinishReason.LENGTH
            self.finished.append(sequence)
            self.scheduler.remove(sequence)

    def run_out(self, wish: int = 0, accept: int = 0) -> int:
        """Step until all is done; how many steps that took. No step may be idle while somebody has work."""
        num_steps = 0
        while self.scheduler.running or self.scheduler.waiting:
            assert self.step(wish, accept), "nothing runs though something could"
            num_steps += 1
            assert num_steps < 5000, "starvation"
        assert self.cache.num_available_blocks == self.num_blocks
        return num_steps


sizes = st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 2), st.integers(0, 2))
worlds = st.builds(
    World,
    num_blocks=st.integers(13, 40),
    row_budget=st.integers(1, 20) | st.integers(30, 60),
    max_batch_size=st.integers(1, 6),
    total_token_limit=st.none() | st.integers(50, 120),
    chunked=st.sampled_from([True, True, False]),
    guaranteed=st.booleans(),
    prefix_cache=st.booleans(),
)


class TestAnyLoad:
    @given(
        world=worlds,
        loads=st.lists(st.lists(sizes, max_size=3), min_size=1, max_size=8),
        wish=st.integers(0, 15),
        accept=st.integers(0, 15),
        cancel=st.lists(st.integers(0, 20), max_size=3),
    )
    @settings(max_examples=250, deadline=None)
    def test_budget_limits_and_blocks_hold_and_everyone_finishes(self, world, loads, wish, accept, cancel):
        assume(world.chunked or world.row_budget >= 30)  # the engine refuses prompts longer than a step
        sequences: list[Sequence] = []
        for load in loads:  # each arrives before another step
            for num_prompt, max_tokens, priority, first_token in load:
                sequences.append(make_sequence(f"{len(sequences)}", num_prompt, max_tokens, priority, first_token))
                world.scheduler.add(sequences[-1])
            world.step(wish, accept)
        gone = []
        for index in cancel:
            if index < len(sequences) and not sequences[index].finished:
                sequences[index].finish_reason = FinishReason.CANCELLED
                world.scheduler.remove(sequences[index])
                gone.append(sequences[index])
        world.run_out(wish, accept)
        assert {id(s) for s in world.finished} | {id(s) for s in gone} == {id(s) for s in sequences}
        assert all(s.block_table == [] for s in sequences)
        if world.guaranteed:
            assert not world.preempted


class TestRows:
    def test_every_decoding_sequence_has_a_row_in_every_step_and_prompts_share_the_rest(self):
        world = World(row_budget=8, max_batch_size=3)
        first = make_sequence("first", 3, 20)
        world.scheduler.add(first)
        world.step()
        world.scheduler.add(make_sequence("long", 25, 2, first_token=50))
        rows = [{turn.sequence.request.request_id: turn.num_rows for turn in world.step(wish=15)} for _ in range(3)]
        assert all(row["first"] >= 1 for row in rows)
        assert all(row["long"] >= 4 for row in rows), "drafts leave a prompt half of the rows"
        assert all(sum(row.values()) == 8 for row in rows)

    def test_drafts_take_what_a_short_prompt_leaves(self):
        world = World(row_budget=16, max_batch_size=3)
        world.scheduler.add(make_sequence("first", 3, 30))
        world.step()
        world.scheduler.add(make_sequence("short", 2, 5, first_token=50))
        decoding, draft_rows = world.scheduler.schedule()
        assert (len(decoding), draft_rows) == (1, 16 - 1 - 2)

    def test_unchunked_prompts_wait_for_a_step_that_takes_them_whole(self):
        world = World(row_budget=10, max_batch_size=4, chunked=False)
        for name, num_prompt in (("a", 6), ("b", 6), ("c", 4)):
            world.scheduler.add(make_sequence(name, num_prompt, 9, first_token=100 * num_prompt))
        steps = [[(t.sequence.request.request_id, t.num_rows) for t in world.step()] for _ in range(2)]
        assert steps[0] == [("a", 6)], "nothing overtakes a prompt that waits for rows"
        assert steps[1] == [("b", 6), ("c", 4)]

    def test_drafts_longer_than_what_was_offered_are_cut(self):
        world = World(row_budget=8, max_batch_size=2)
        for index in range(2):
            world.scheduler.add(make_sequence(str(index), 4, 40, first_token=100 * index))
        world.step()
        decoding, _ = world.scheduler.schedule()
        turns = world.scheduler.allot(decoding, [Draft([7] * 5, torch.ones(5, 3) / 3), Draft([7] * 5)])
        world.check(turns)
        assert [turn.num_rows for turn in turns] == [6, 2]

    def test_a_draft_never_reaches_past_the_last_token(self):
        world = World()
        world.scheduler.add(make_sequence("a", 3, 4))
        world.step()
        [turn] = world.step(wish=7)
        assert len(turn.draft) == 2, "three tokens are left, the last of which comes from the target"


class TestOrder:
    def names(self, world: World) -> list[str]:
        return [sequence.request.request_id for sequence in world.finished]

    def test_priority_then_arrival(self):
        world = World(max_batch_size=1)
        for name, priority in (("late", 5), ("a", 1), ("b", 1), ("urgent", 0)):
            world.scheduler.add(make_sequence(name, 3, 2, priority))
        world.run_out()
        assert self.names(world) == ["urgent", "a", "b", "late"]

    def test_small_requests_do_not_overtake_a_large_one_for_ever(self):
        world = World(num_blocks=16, max_batch_size=4, row_budget=16)
        world.scheduler.add(make_sequence("running", 8, 12))
        world.step()
        world.scheduler.add(make_sequence("large", 40, 20, first_token=500))
        for count in range(40):
            world.scheduler.add(make_sequence(f"small{count}", 2, 2, first_token=1000 + 10 * count))
            world.step()
        world.run_out()
        admitted = sorted(world.finished, key=lambda sequence: sequence.stats.first_scheduled_at)
        assert [sequence.request.request_id for sequence in admitted[:3]] == ["running", "large", "small0"]

    @pytest.mark.parametrize("changes", [{"max_batch_size": 2}, {"total_token_limit": 25}, {"num_blocks": 6}], ids=str)
    def test_admission_waits_for_what_is_scarce_and_goes_on_when_it_is_back(self, changes):
        world = World(**changes)
        for index in range(5):
            world.scheduler.add(make_sequence(str(index), 6, 6, first_token=100 * index))
        world.step()
        assert (len(world.scheduler.running), len(world.scheduler.waiting)) == (2, 3)
        world.run_out()
        assert sorted(self.names(world)) == ["0", "1", "2", "3", "4"]


class TestPreemption:
    def test_the_last_in_rank_makes_room_and_comes_back(self):
        world = World(num_blocks=8, max_batch_size=3, row_budget=32, guaranteed=False, prefix_cache=False)
        for index, priority in enumerate((1, 0, 2)):
            world.scheduler.add(make_sequence(str(priority), 7, 20, priority, first_token=100 * index))
        world.run_out()
        assert world.preempted, "eight blocks are not enough for three of up to seven"
        assert world.preempted[0].request.request_id == "2"
        assert "0" not in {sequence.request.request_id for sequence in world.preempted}
        assert [sequence.request.request_id for sequence in world.finished] == ["0", "1", "2"]

    def test_nobody_is_admitted_into_the_block_that_a_running_sequence_needs_next(self):
        world = World(num_blocks=4, max_batch_size=2, row_budget=32, guaranteed=False, prefix_cache=False)
        world.scheduler.add(make_sequence("a", 8, 4))
        world.step()
        world.scheduler.add(make_sequence("b", 7, 2, first_token=100))
        world.run_out()
        assert not world.preempted

    def test_drafts_preempt_nobody(self):
        world = World(num_blocks=4, max_batch_size=2, row_budget=32, guaranteed=False, prefix_cache=False)
        for index in range(2):
            world.scheduler.add(make_sequence(str(index), 6, 3, first_token=100 * index))
        world.run_out(wish=15)
        assert not world.preempted

    def test_a_preempted_sequence_longer_than_a_step_comes_back_without_chunked_prefill(self):
        world = World(num_blocks=9, max_batch_size=2, row_budget=8, chunked=False, guaranteed=False, prefix_cache=False)
        for index in range(2):
            world.scheduler.add(make_sequence(str(index), 8, 20, first_token=100 * index))
        world.run_out()
        assert world.preempted
        assert len(world.finished) == 2


class TestForks:
    def prefilled(self, world: World, num_prompt: int) -> tuple[Sequence, list[Sequence]]:
        request = Request("r", tuple(range(num_prompt)), SamplingParams(max_tokens=6, n=3))
        parent, *children = [Sequence(request, index) for index in range(3)]
        world.scheduler.add(parent)
        while not parent.num_output_tokens:
            world.step()
        return parent, children

    @pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9])
    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_children_share_the_prompt_and_compute_one_row(self, num_prompt, prefix_cache):
        world = World(prefix_cache=prefix_cache)
        parent, children = self.prefilled(world, num_prompt)
        for child in children:
            world.scheduler.add_fork(parent, child)
        world.cache.check([sequence.block_table for sequence in world.scheduler.running])
        num_shared_blocks = (num_prompt - 1) // SIZE
        for child in children:
            assert child.num_computed_tokens == num_prompt - 1
            assert child.block_table[:num_shared_blocks] == parent.block_table[:num_shared_blocks]
        turns = world.step()
        assert {turn.num_rows for turn in turns if turn.sequence is not parent} == {1}
        world.run_out()
        assert len(world.finished) == 3

    def test_children_without_room_wait_like_any_other(self):
        world = World(max_batch_size=2)
        parent, children = self.prefilled(world, 9)
        for child in children:
            world.scheduler.add_fork(parent, child)
        assert (len(world.scheduler.running), len(world.scheduler.waiting)) == (2, 1)
        world.run_out()
        assert len(world.finished) == 3

    def test_blocks_promised_to_others_are_not_given_to_children(self):
        world = World(num_blocks=5, max_batch_size=8)  # parent: 9 + 6 tokens, 4 blocks; a child needs 2 of its own
        parent, children = self.prefilled(world, 9)
        for child in children:
            world.scheduler.add_fork(parent, child)
        assert world.scheduler.running == [parent]
        world.run_out()
        assert len(world.finished) == 3
        assert not world.preempted
