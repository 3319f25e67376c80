"""Ragged tensors and the records that carry them."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.experience.micro_batches import lengths_in_blocks, micro_batches
from megatron_rl.losses.aggregate import BatchTotals, counted, token_weights
from megatron_rl.records import (
    Batch,
    conversations,
    one_per_group,
    prompts_of,
    ragged,
    ragged_from_lengths,
    repeated,
    row_lengths,
    single_turn,
)

modest = settings(max_examples=40, deadline=None)
row_lists = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6)


def tokens(rows):
    return ragged([torch.tensor(row, dtype=torch.int64) for row in rows])


def as_lists(batch):
    return [row.tolist() for row in batch.unbind()]


def three_prompts():
    return Batch(
        index=torch.tensor([7, 8, 9]),
        sample=torch.tensor([0, 0, 0]),
        input_ids=tokens([[1, 2], [3], [4, 5, 6]]),
        data_source=["a", "b", "c"],
        ground_truth=["x", "y", "z"],
        extra_info=[{"k": 1}, {"k": 2}, {"k": 3}],
        uid=torch.arange(3),
    )


def two_samples():
    return single_turn(
        tokens([[1, 2, 3], [4, 5, 6, 7]]),
        torch.tensor([1, 2]),
        rollout_log_probs=ragged([torch.tensor([-0.5]), torch.tensor([-1.0, -2.0])]),
        old_log_probs=ragged([torch.tensor([0.1]), torch.tensor([0.2, 0.3])]),
        advantages=ragged([torch.tensor([1.1]), torch.tensor([1.2, 1.3])]),
        old_values=ragged([torch.tensor([2.1]), torch.tensor([2.2, 2.3])]),
        returns=ragged([torch.tensor([3.1]), torch.tensor([3.2, 3.3])]),
    )


@modest
@given(rows=row_lists)
def test_ragged_round_trip(rows):
    """There and back is the identity, from rows and from flat values. Would not catch a lost device."""
    batch, lengths = tokens(rows), [len(row) for row in rows]
    assert as_lists(batch) == rows
    assert row_lengths(batch).tolist() == lengths
    assert as_lists(ragged_from_lengths(batch.values(), torch.tensor(lengths))) == rows


def test_ragged_refuses_nothing():
    """No rows, no dtype to guess. Would not catch an empty row, which is allowed."""
    with pytest.raises(ValueError, match="at least one row"):
        ragged([])


def test_repeat_keeps_samples_of_a_prompt_together():
    """Two samples each of three prompts. Would not catch samples that share a dict."""
    twice = repeated(three_prompts(), 2)
    assert twice["index"].tolist() == [7, 7, 8, 8, 9, 9]
    assert twice["sample"].tolist() == [0, 1, 0, 1, 0, 1]
    assert twice["uid"].tolist() == [0, 0, 1, 1, 2, 2]
    assert as_lists(twice["input_ids"]) == [[1, 2], [1, 2], [3], [3], [4, 5, 6], [4, 5, 6]]
    assert twice.objects("ground_truth") == ["x", "x", "y", "y", "z", "z"]


def test_repeat_goes_on_counting_a_prompt_held_twice():
    """Prompt 7 in rows 0 and 2 gets samples 0 to 3, in two groups, so seeds differ. Would not catch two batches."""
    twice = repeated(three_prompts()[torch.tensor([0, 1, 0])], 2)
    assert twice["index"].tolist() == [7, 7, 8, 8, 7, 7]
    assert twice["sample"].tolist() == [0, 1, 0, 1, 2, 3]
    assert twice["uid"].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_prompt_is_a_row_without_its_response():
    """The prompts of answered rows are what they were, and one of each group is left. Would not catch a response of
    several turns, whose observations are not the prompt's.
    """
    asked = repeated(three_prompts(), 2)
    answered = [torch.cat([ids, torch.tensor([50 + row])]) for row, ids in enumerate(asked["input_ids"].unbind())]
    rows = single_turn(ragged(answered), torch.ones(6, dtype=torch.int64), **{n: asked[n] for n in ("uid", "index")})
    again = one_per_group(prompts_of(rows))
    assert as_lists(again["input_ids"]) == [[1, 2], [3], [4, 5, 6]] and again["index"].tolist() == [7, 8, 9]
    assert set(again.names) == {"input_ids", "index", "uid"}


@modest
@given(data=st.data())
def test_rows_stay_whole_under_slicing_indexing_and_concatenation(data):
    """Every field of a row follows it, non-tensors too, flat values included. Would not catch a wrong field name."""
    prompts = three_prompts()
    for _ in range(data.draw(st.integers(1, 3))):
        count = len(prompts)
        kind = data.draw(st.sampled_from(["slice", "index", "cat"]))
        if kind == "slice":
            start = data.draw(st.integers(0, count - 1))
            prompts = prompts[start : data.draw(st.integers(start + 1, count))]
        elif kind == "index":
            prompts = prompts[torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4)))]
        else:
            prompts = Batch.joined([prompts[count - 1 :], prompts])
    rows = {7: ([1, 2], "a", "x", {"k": 1}), 8: ([3], "b", "y", {"k": 2}), 9: ([4, 5, 6], "c", "z", {"k": 3})}
    expected = [rows[index] for index in prompts["index"].tolist()]
    fields = (as_lists(prompts["input_ids"]), *map(prompts.objects, ("data_source", "ground_truth", "extra_info")))
    assert list(zip(*map(list, fields), strict=True)) == expected
    assert prompts.flat("input_ids").tolist() == [token for ids, *_ in expected for token in ids]


def test_pickle_keeps_ragged_rows():
    """Records travel between processes by pickle. Would not catch a pickle that carries the whole batch's storage."""
    copy = pickle.loads(pickle.dumps(three_prompts()[1:]))
    assert as_lists(copy["input_ids"]) == [[3], [4, 5, 6]]
    assert copy.objects("extra_info") == [{"k": 2}, {"k": 3}]


def test_each_pass_reads_its_columns():
    """Values tell the fields apart. Would not catch a role that reads the wrong pass's."""
    experience = two_samples()
    actor, critic, sequences = (
        experience.read_by(ACTOR_UPDATE),
        experience.read_by(CRITIC_UPDATE),
        experience.read_by(SCORING),
    )
    assert "returns" not in actor and "advantages" not in critic and sequences.names == ("input_ids", "sampled")
    for batch in (actor, critic, sequences):
        assert as_lists(batch["input_ids"]) == [[1, 2, 3], [4, 5, 6, 7]]
        assert batch.num_sampled.tolist() == [1, 2]
    assert torch.equal(actor.flat("old_log_probs"), torch.tensor([0.1, 0.2, 0.3]))
    assert torch.equal(actor.flat("advantages"), torch.tensor([1.1, 1.2, 1.3]))
    assert torch.equal(critic.flat("old_values"), torch.tensor([2.1, 2.2, 2.3]))
    assert torch.equal(critic.flat("returns"), torch.tensor([3.1, 3.2, 3.3]))


def test_the_critic_trains_on_what_is_kept():
    """The second answer's last token is left out: losses 1, 2 and 100 have the mean 1.5, as the actor's would.

    Would not catch a role that reads the wrong record.
    """
    experience = two_samples()
    experience.add(kept=ragged([torch.tensor([1.0]), torch.tensor([1.0, 0.0])]))
    for batch in (experience.read_by(ACTOR_UPDATE), experience.read_by(CRITIC_UPDATE)):
        (block,) = micro_batches(Batch.joined([batch, batch[:1].neutral()]), [[0, 1, 2]], remove_padding=True)
        totals = BatchTotals(*counted(block.kept, block.num_sampled).tolist())
        assert totals == BatchTotals(tokens=2, rows=2)
        weights = token_weights(block.kept, block.num_sampled, totals, "token-mean", 8)
        assert float((weights * torch.tensor([1.0, 2.0, 100.0])).sum()) == 1.5


@pytest.mark.parametrize(
    ("reader", "columns"), [(ACTOR_UPDATE, ("old_log_probs", "advantages")), (CRITIC_UPDATE, ("old_values", "returns"))]
)
def test_neutral_rows_keep_tokens_and_lose_responses(reader, columns):
    """Same tokens, no response positions, and they join. Would not catch a loss that counts rows."""
    batch = two_samples().read_by(reader)
    neutral = batch.neutral()
    assert as_lists(neutral["input_ids"]) == [[1, 2, 3], [4, 5, 6, 7]]
    assert neutral.num_sampled.tolist() == [0, 0]
    joined = Batch.joined([batch, neutral[:1]])
    assert joined.num_sampled.tolist() == [1, 2, 0]
    for name in columns:
        assert as_lists(joined[name])[2] == []
        assert torch.equal(joined.flat(name), batch.flat(name))


def test_rows_may_be_several_conversations():
    """By hand: rows of 3, of 4 in two conversations, and of 2; one batch of them does not say. Would not catch a start
    in the first place of a row, which is one anyway.
    """
    ids, nothing = [torch.arange(length) for length in (3, 4, 2)], [torch.zeros(n).bool() for n in (3, 4, 2)]
    starts = [nothing[0], torch.tensor([False, False, True, False])]
    some = Batch(input_ids=ragged(ids[:2]), sampled=ragged(nothing[:2]), conversation_starts=ragged(starts))
    other = Batch(input_ids=ragged(ids[2:]), sampled=ragged(nothing[2:]))
    assert [part.tolist() for part in conversations(other)] == [[1], [2]]
    for joined, sizes in ((Batch.joined([some, other]), [3, 2, 2, 2]), (Batch.joined([other, some]), [2, 3, 2, 2])):
        numbers, lengths = conversations(joined)
        assert lengths.tolist() == sizes and sorted(numbers.tolist()) == [1, 1, 2]
        assert lengths_in_blocks(joined, 4) == [4 * n for n in numbers.tolist()]
    with pytest.raises(ValueError, match="first token of a conversation"):
        Batch(input_ids=some["input_ids"], sampled=ragged(starts), conversation_starts=ragged(starts))
