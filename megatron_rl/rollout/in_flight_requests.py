"""Unfinished requests of an engine: vLLM runs a counted number of steps, and requests start and stop only between.

One engine step generates one token for each running request, and with drafts those that were drafted right. Nothing
runs between two slices, so weights may be changed there in place. An unfinished request continues with the keys and
values that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_rl.config.rollout_keys import EARLIER
from megatron_rl.observe.liveness import counting, finished_one
from megatron_rl.records import Sampling
from megatron_rl.remote_columns import ColumnPiece
from megatron_rl.rollout.draft_meter import DraftMeter
from megatron_rl.rollout.image_inputs import prompt_of
from megatron_rl.rollout.replica_groups import ReplicaGroups, share_out
from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Drawn, Slice, Start
from third_party_patches.vllm.reports_at_the_end import report_rest


def sampling_params(
    sampling: Sampling, seed: int, eos_token_ids: Sequence[int], max_tokens: int, kind: RequestOutputKind
) -> SamplingParams:
    """vLLM's parameters of one request; the engine returns its log-prob of each token after temperature and filters."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=list(eos_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,  # otherwise every token is a dictionary and an object in it
        detokenize=False,
        seed=seed,
        output_kind=kind,
        skip_clone=True,  # nobody else has this object, and a deep copy of each costs more than a decoding step
    )


def token_log_probs(answer: CompletionOutput) -> list[float]:
    """The log-prob of each token of a response, which was generated with `sampling_params`.

    Raises RuntimeError if vLLM's log-probs belong to other tokens.
    """
    flat = answer.logprobs or FlatLogprobs()
    if not isinstance(flat, FlatLogprobs) or list(flat.token_ids) != list(answer.token_ids):
        raise RuntimeError(f"vLLM's log-probs are not those of the tokens that it sampled: {answer}")
    log_probs: list[float] = flat.logprobs
    return log_probs


@dataclass
class NewTokens:
    """Additions of one slice so far, by the number of the request; see `Drawn`."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    experts: dict[int, ColumnPiece] = field(default_factory=dict)


class InFlightRequests:
    """The unfinished requests of one engine. All ranks of a replica must make the same calls.

    groups: the replica's TP groups, each of which has its share of the requests in its engine. routed_layers: the
    layers that have experts, of an engine that returns the experts of every token. adapters: what requests name, by
    slot, if the engine reads any.
    An engine that schedules asynchronously has a step running while it reports another one: its slices count no steps,
    and end after the last step that was scheduled.
    """

    def __init__(
        self,
        engine: LLMEngine,
        groups: ReplicaGroups,
        eos_token_ids: Sequence[int],
        routed_layers: Sequence[int] = (),
        adapters: Sequence[LoRARequest] = (),
    ) -> None:
        self._engine, self._core, self.groups = engine, engine.engine_core.engine_core, groups
        self._eos_token_ids, self._routed_layers = eos_token_ids, list(routed_layers)
        self._adapters = adapters
        self._meter = None if engine.vllm_config.speculative_config is None else DraftMeter(engine)
        cache = engine.vllm_config.cache_config
        self._shares_parts = cache.prefix_match_unit not in (None, cache.block_size)
        self._images: dict[str, MultiModalKwargsItem] = {}  # key -> images of one slice's starts
        self._names: dict[int, str] = {}  # request of this group -> vLLM's own name for it
        self._places: dict[int, int] = {}  # unfinished request of the replica -> its group
        self._routed: set[int] = set()  # unfinished requests whose experts are returned

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Numbers of the requests that continue with the next slice, in the order of their starts."""
        return tuple(self._places)

    def advance(self, order: Slice) -> tuple[dict[int, Drawn], int]:
        """Drop, start and step; returns the new tokens of each request that has any, and the number of steps. Ranks of
        the first TP group return those of the whole replica, others those of their own group.

        The engine must have the weights of `order.version`. If nothing is unfinished after the drops, the slice begins
        with an empty prefix cache, so that its tokens do not depend on earlier requests; not with
        `order.keeps_prefixes`. Raises ValueError, before anything is changed, for a drop of a request that is not
        unfinished here and a start of one that is.
        """
        self._check(order)
        for request in order.drops:
            if self._places.pop(request) == self.groups.dp_rank:
                # One by one: vLLM frees several requests in the order of a set of strings, which differs between ranks.
                self._engine.abort_request([self._names.pop(request)], internal=True)
                self._routed.discard(request)
        if not (self._places or order.keeps_prefixes):
            forget_prefixes(self._engine)
        places = share_out(order.starts, self._places, self.groups.dp_size)
        self._places |= places
        starts = tuple(start for start in order.starts if places[start.request] == self.groups.dp_rank)
        # A slice that ends with its last request reports each once, at its end: reports of single steps cost time.
        kind = RequestOutputKind.FINAL_ONLY if order.num_steps is None else RequestOutputKind.DELTA
        now, later = apart(starts) if self._shares_parts else (starts, ())
        for start in now:
            self._start(start, order.version, kind)
        names = dict(self._names)
        new = NewTokens()
        num_steps = 0
        with counting("responses", len(self._names) + len(later)):
            while num_steps != order.num_steps and self.groups.any(bool(self._names or later)):
                self._engine.should_execute_dummy_batch = not (self._names or later)
                for output in self._engine.step():
                    self._take(output, new)
                num_steps += 1
                names |= self._start_all(later, order.version, kind)
                later = ()
        rest, order_of_names = report_rest(self._engine)
        for output in rest:
            self._take(output, new)
        self._start_all(later, order.version, kind)  # of a slice without a step
        self._images.clear()  # a request keeps those that it names
        self._wait_for_steps()
        for request in self._routed.intersection(new.token_ids):
            new.experts[request] = experts_of_tokens(self._experts_so_far(request), self._routed_layers)
        requests = {name: request for request, name in names.items()}
        drawn: dict[int, Drawn] = {}
        order_of_requests = (requests[name] for name in order_of_names if name in requests)  # not of calls by others
        for request in dict.fromkeys([*order_of_requests, *new.token_ids]):
            token_ids = new.token_ids[request]
            drafts = None if self._meter is None else self._meter.take(names[request], len(token_ids))
            log_probs, ended = tuple(new.log_probs[request]), new.finish.get(request, "")
            drawn[request] = Drawn(tuple(token_ids), log_probs, ended, new.experts.get(request), drafts)
        for request in set[int]().union(*self.groups.all(list(new.finish))):
            del self._places[request]
        return self.groups.collect(drawn), num_steps

    def _take(self, output: Any, new: NewTokens) -> None:
        """Add vLLM's output of a request to those of the slice."""
        assert isinstance(output, RequestOutput)
        request, (answer,) = int(output.request_id), output.outputs
        new.token_ids.setdefault(request, []).extend(answer.token_ids)
        new.log_probs.setdefault(request, []).extend(token_log_probs(answer))
        if output.finished:
            new.finish[request] = finish_of(request, answer)
            del self._names[request]
            finished_one()
            if request in self._routed:
                self._routed.remove(request)
                new.experts[request] = experts_of_tokens(answer.routed_experts, self._routed_layers)

    def _experts_so_far(self, request: int) -> numpy.ndarray | None:
        """Take the experts of an unfinished request's tokens since the last call: vLLM collects them, step by step, for
        its end.
        """
        collected = self._engine.output_processor.request_states[self._names[request]].routed_experts_chunks
        rows = numpy.concatenate(collected) if collected else None
        collected.clear()
        return rows

    def _wait_for_steps(self) -> None:
        """Run to their ends the steps that were scheduled before the last response was known to have ended."""
        while self._core.batch_queue:
            if ended := self._engine.step():
                raise RuntimeError(f"vLLM reported more of responses that had ended: {ended}")

    def _check(self, order: Slice) -> None:
        if self._core.batch_queue is not None and order.num_steps:
            raise ValueError(
                f"a slice of {order.num_steps} engine steps needs an engine without asynchronous scheduling "
                "(actor_rollout_ref.rollout.async_scheduling=false)"
            )
        here = set(self._places)
        for request in order.drops:
            if request not in here:
                raise ValueError(f"request {request} cannot be dropped: unfinished here are {sorted(here)}")
            here.remove(request)
        for start in order.starts:
            if start.request in here:
                raise ValueError(f"request {start.request} cannot be started: it is unfinished here")
            if start.slot >= max(1, len(self._adapters)):
                raise ValueError(f"request {start.request} names slot {start.slot} of {len(self._adapters)}")
            here.add(start.request)

    def _start_all(self, starts: Sequence[Start], version: int, kind: RequestOutputKind) -> dict[int, str]:
        for start in starts:
            self._start(start, version, kind)
        return {start.request: self._names[start.request] for start in starts}

    def _start(self, start: Start, version: int, kind: RequestOutputKind) -> None:
        params = sampling_params(start.sampling, start.seed, self._eos_token_ids, start.max_tokens, kind)
        if start.earlier:
            params.extra_args = {EARLIER: start.earlier}
        if start.experts_from is not None:
            params.routed_experts_prompt_start = start.experts_from
            self._routed.add(start.request)
        # A cached prefix of other weights must not match. vLLM's keys have the adapter's name, too.
        prompt: Any = prompt_of(start, f"version {version}", self._images)
        adapter = self._adapters[start.slot] if self._adapters else None
        self._names[start.request] = self._engine.add_request(str(start.request), prompt, params, lora_request=adapter)


def apart(starts: Sequence[Start]) -> tuple[tuple[Start, ...], tuple[Start, ...]]:
    """Return the first request of every prompt, and the others: one step later they find what the first has read."""
    first: dict[tuple[object, ...], int] = {}
    for start in starts:
        first.setdefault(start.prompt_key, start.request)
    leaders = set(first.values())
    now = tuple(start for start in starts if start.request in leaders)
    return now, tuple(start for start in starts if start.request not in leaders)


def experts_of_tokens(rows: numpy.ndarray | None, layers: Sequence[int]) -> ColumnPiece:
    """The experts that vLLM has returned [T, all layers, K] as uint8 or int16 [T, layers, K].

    layers: the layers of the model that have experts. Raises RuntimeError if vLLM has returned none.
    """
    if rows is None:
        raise RuntimeError("vLLM has returned new tokens without the experts of those that it has read")
    # vLLM returns more than 256 experts as uint16, which torch hardly supports.
    return ColumnPiece.whole(torch.from_numpy(rows if rows.itemsize == 1 else rows.astype("int16"))[:, layers])


def finish_of(request: int, answer: CompletionOutput) -> str:
    """Why a response ended. Raises RuntimeError for a reason other than stop and length."""
    if answer.finish_reason not in (FINISHED_BY_STOP, FINISHED_BY_LENGTH):
        raise RuntimeError(f"vLLM ended request {request} for another reason: {answer.finish_reason}")
    return str(answer.finish_reason)


def forget_prefixes(engine: LLMEngine) -> None:
    """Empty the prefix cache, and that of images. Raises RuntimeError if the engine still has requests."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
    if engine.model_config.supports_multimodal_inputs:
        engine.reset_encoder_cache()


def of_ranks(mine: str) -> list[str]:
    """The texts of all ranks of this rank's rollout TP group, in rank order; all of them must call."""
    group = parallel_state.get_tp_group()
    texts = [mine] * group.world_size
    if group.world_size > 1:
        dist.all_gather_object(texts, mine, group=group.cpu_group)
    return texts


def of_replica(mine: str) -> list[str]:
    """The texts of all ranks of this rank's replica; all of them must call."""
    groups = ReplicaGroups(parallel_state.get_dp_group().cpu_group)
    return [text for texts in groups.all(of_ranks(mine)) for text in texts]
