"""What a request draws with drafts, by vLLM's own sampler: the tokens that it draws without, and their distribution."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput

VOCABULARY, NUM_DRAFTS, ROWS = 6, 2, 4000
SIGNIFICANCE = 1e-4
"""A right sampler fails once in so many seeds; the seed is fixed."""

# The engine is imported where it is needed: whoever collects the tests does not need it.


def metadata(generators: dict[int, torch.Generator], num_rows: int, temperature: float = 1.0, **changes) -> Any:
    """vLLM's own, of requests without penalties."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.empty(0)
    usual = {
        "temperature": torch.full((num_rows,), temperature) if temperature else None,
        "all_greedy": not temperature,
        "all_random": bool(temperature),
        "top_p": None,
        "top_k": None,
        "generators": generators,
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": nothing,
        "presence_penalties": nothing,
        "repetition_penalties": nothing,
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([]),
    }
    return SamplingMetadata(**usual | changes)


def seeded(num_rows: int, seed: int = 0) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(1000 * seed + row) for row in range(num_rows)}


def by_drafts(logits: torch.Tensor, drafts: list[list[int]], asked: Any) -> SamplerOutput:
    """logits [requests, drafts + 1, vocabulary], of which a request with fewer drafts has the first."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from third_party_patches.vllm.drafts_keep_samples import forward

    spec = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    rows = torch.cat([table[: len(own) + 1] for table, own in zip(logits, drafts, strict=True)])
    return forward(SimpleNamespace(sampler=Sampler("processed_logprobs")), spec, None, rows, asked)


def one_by_one(logits: torch.Tensor, asked: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs [requests, num_tokens] of the plain sampler."""
    from vllm.v1.sample.sampler import Sampler

    steps = [Sampler("processed_logprobs")(logits[:, place].clone(), asked) for place in range(num_tokens)]
    return (
        torch.cat([step.sampled_token_ids for step in steps], 1),
        torch.cat([step.logprobs_tensors.logprobs for step in steps], 1),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 3}])
def test_tokens_do_not_depend_on_drafts(temperature, filters):
    """Drafts that are right to the end, wrong from a place on, or none, in one batch: the plain sampler's tokens and
    log-probs, and each generator where plain sampling leaves it.

    Would not catch another distribution of the plain sampler.
    """
    num_rows = 12
    columns = {name: torch.full((num_rows,), number) for name, number in filters.items()} if temperature else {}
    logits = 2 * torch.randn(num_rows, NUM_DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    tokens, log_probs = one_by_one(logits, metadata(seeded(num_rows), num_rows, temperature, **columns), NUM_DRAFTS + 1)
    num_right = [row % 3 for row in range(num_rows)]
    drafts = [
        tokens[row, :right].tolist() + [(int(tokens[row, right]) + 1) % VOCABULARY] * (NUM_DRAFTS - right)
        for row, right in enumerate(num_right)
    ]
    drafts[3] = []
    generators = seeded(num_rows)
    drawn = by_drafts(logits, drafts, metadata(generators, num_rows, temperature, **columns))
    of_each = drawn.logprobs_tensors.logprobs.reshape(num_rows, NUM_DRAFTS + 1)
    for row, right in enumerate(num_right):
        assert drawn.sampled_token_ids[row].tolist() == tokens[row, : right + 1].tolist() + [-1] * (NUM_DRAFTS - right)
        torch.testing.assert_close(of_each[row, : right + 1], log_probs[row, : right + 1], rtol=0, atol=1e-6)
    plain = seeded(num_rows)
    for num_tokens in range(1, NUM_DRAFTS + 2):
        rows = [row for row, right in enumerate(num_right) if right + 1 >= num_tokens]
        own = metadata({place: plain[row] for place, row in enumerate(rows)}, len(rows), temperature)
        one_by_one(logits[rows, num_tokens - 1 :], own, 1)
    assert all(torch.equal(generators[row].get_state(), plain[row].get_state()) for row in plain)


def test_distribution_of_drafted_tokens():
    """The pair of a drafted token and the one after it, of 4,000 seeds, against exact probabilities: chi-square.

    Would not catch a dependence between requests.
    """
    table = torch.randn(NUM_DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(5))
    logits = table.expand(ROWS, -1, -1)
    draft = int(table[0].argmax())
    drawn = by_drafts(logits, [[draft, 0]] * ROWS, metadata(seeded(ROWS, seed=1), ROWS)).sampled_token_ids
    first, second = (table[place].softmax(-1).double() for place in (0, 1))
    expected = [
        *(ROWS * first[draft] * second),
        *(ROWS * first[token] for token in range(VOCABULARY) if token != draft),
    ]
    counts = [int(((drawn[:, 0] == draft) & (drawn[:, 1] == token)).sum()) for token in range(VOCABULARY)]
    counts += [int((drawn[:, 0] == token).sum()) for token in range(VOCABULARY) if token != draft]
    assert sum(counts) == ROWS
    assert bool((drawn[drawn[:, 0] != draft, 1] == -1).all())
    squares = sum((count - float(mean)) ** 2 / float(mean) for count, mean in zip(counts, expected, strict=True))
    assert chance_beyond(squares, len(counts) - 1) > SIGNIFICANCE


def chance_beyond(squares: float, freedom: int) -> float:
    """The chance of a sum of squares at least as large, by the regularised upper incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(squares / 2.0).double()))


def test_chance_beyond():
    """Two known values: exp(-x/2) at two degrees of freedom, and the 95% point of ten."""
    assert chance_beyond(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert chance_beyond(18.307, 10) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"no_penalties": False}, "penalties"),
        ({"max_num_logprobs": -1}, "log-probs of all tokens"),
        ({"bad_words_token_ids": {0: [[3]]}}, "bad words"),
    ],
)
def test_what_depends_on_the_row_is_refused(changes, name):
    """Would not catch a processor of logits that vLLM adds."""
    with pytest.raises(NotImplementedError, match=name):
        by_drafts(torch.zeros(1, 2, VOCABULARY), [[1]], metadata({}, 1, **changes))
