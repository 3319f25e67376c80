"""The visiting order over several files."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.prompt_mixture import MixtureCursor, PromptFile
from megatron_rl.errors import ConfigError

mixtures = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0])), min_size=1, max_size=4)


def files(*sizes):
    return [
        PromptFile(f"folder/{number}.parquet", size, {"tokens": f"{number}", "data sources": "s"})
        for number, size in enumerate(sizes)
    ]


def test_without_weights_all_files_are_one_set():
    """The order of one file with all prompts. Would not catch a wrong digest of the files."""
    mixture = MixtureCursor(files(3, 4), None, 5, shuffle=True, seed=3)
    cursor = MixtureCursor(files(7), None, 5, shuffle=True, seed=3)
    assert [mixture.next_indices() for _ in range(4)] == [cursor.next_indices() for _ in range(4)]


def test_weights_by_hand():
    """Three to one, files in order; the small file comes round again. Would not catch a shuffle that is ignored."""
    mixture = MixtureCursor(files(4, 1), [3, 1], 4, shuffle=False, seed=0)
    assert [mixture.next_indices() for _ in range(2)] == [[0, 1, 4, 2], [3, 0, 4, 1]]


@given(mixture=mixtures, batch_size=st.integers(1, 7), seed=st.integers(0, 2))
def test_shares_are_kept_and_no_prompt_of_a_file_is_lost(mixture, batch_size, seed):
    """At any time within one prompt per other file of the shares. Would not catch a period in the mixing."""
    sizes, weights = zip(*mixture, strict=True)
    cursor = MixtureCursor(files(*sizes), weights, batch_size, shuffle=True, seed=seed)
    drawn = [index for _ in range(20) for index in cursor.next_indices()]
    offset = 0
    for size, weight in mixture:
        own = [index for index in drawn if offset <= index < offset + size]
        assert abs(len(own) - len(drawn) * weight / sum(weights)) <= max(1, len(sizes) - 1)
        counts = Counter(own)
        assert not own or max(counts.values()) - min(counts[i] for i in range(offset, offset + size)) <= 1
        offset += size


@given(mixture=mixtures, weighted=st.booleans(), steps=st.integers(0, 6), shuffle=st.booleans())
def test_resume_continues_exactly(mixture, weighted, steps, shuffle):
    """Through JSON, in another folder. Would not catch a batch size that changes, which the shares allow."""
    sizes, weights = zip(*mixture, strict=True)
    arguments = (weights if weighted else None, 3, shuffle, 7)
    old = MixtureCursor(files(*sizes), *arguments)
    for _ in range(steps):
        old.next_indices()
    new = MixtureCursor([PromptFile(f"other/{f.path}", f.num_prompts, f.digests) for f in files(*sizes)], *arguments)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert [new.next_indices() for _ in range(5)] == [old.next_indices() for _ in range(5)]


@pytest.mark.parametrize(
    ("now", "weights", "message"),
    [
        (files(3), [1.0], r"data.train_files is \['0.parquet'\] now and was \['0.parquet', '1.parquet'\]"),
        (files(4, 3)[::-1], [1.0, 2.0], "data.train_files is .*now and was"),
        (files(3, 5), [1.0, 2.0], r"prompts \(num_prompts\) of 1.parquet is 5 now and was 4"),
        (
            [files(3)[0], PromptFile("1.parquet", 4, {"tokens": "1", "data sources": "other"})],
            [1.0, 2.0],
            "digest of data sources of 1.parquet .* is other now and was s",
        ),
        (files(3, 4), [1.0, 1.0], r"train_file_weights is \[1.0, 1.0\] now and was \[1.0, 2.0\]"),
        (files(3, 4), None, r"train_file_weights is None now and was \[1.0, 2.0\]"),
    ],
)
def test_another_mixture_is_refused(now, weights, message):
    """Before anything has moved. Would not catch two files with one digest."""
    state = MixtureCursor(files(3, 4), [1.0, 2.0], 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ConfigError, match=f"cannot resume the prompt order: .*{message}"):
        MixtureCursor(now, weights, 2, shuffle=True, seed=0).load_state_dict(state)


def test_another_seed_is_refused_too():
    """Would not catch a seed that gives the same order."""
    state = MixtureCursor(files(3, 4), [1, 2], 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ConfigError, match="seed is 1 now and was 0"):
        MixtureCursor(files(3, 4), [1, 2], 2, shuffle=True, seed=1).load_state_dict(state)


def test_weights_must_fit():
    """Would not catch a weight that is not a number."""
    for weights in ([1.0], [1.0, 0.0], [1.0, 1.0, 1.0]):
        with pytest.raises(ConfigError, match="for each of 2 files"):
            MixtureCursor(files(3, 4), weights, 2, shuffle=False, seed=0)
