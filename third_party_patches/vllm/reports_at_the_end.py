"""Report the tokens of a request when it ends, or when somebody asks, instead of in every engine step.

Reason: for every token of every request vLLM slices arrays, makes an output and hands it to a processor, which appends
it to lists. Nobody reads them before the request, or the slice of steps, has ended; it is a fourteenth of the time of a
decoding step of a small model.
What it does: an engine without drafts, connectors, experts, statistics and asynchronous scheduling keeps tokens and
log-probs of unfinished requests in lists. It makes one output of a request as it ends, and `report_rest` one of each
other request that has new tokens. A step that has more to report than tokens is vLLM's own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from third_party_patches.guard import VLLM, Patch


class Unreported(NamedTuple):
    """Tokens of a request since its last output, the engine's log-probs and the ranks of these tokens."""

    token_ids: list[int]
    log_probs: list[float]
    ranks: list[int]


def report_rest(engine: Any) -> tuple[list[Any], list[str]]:
    """Return vLLM's outputs of all requests whose tokens are unreported, and the order in which vLLM would have named
    the requests of all outputs since the last call; its names are those of `add_request`.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    reported: list[Any] = engine.output_processor.process_outputs(rest_of(scheduler)).request_outputs
    return reported, list(vars(scheduler).pop("named", ()))


def rest_of(scheduler: Any) -> list[Any]:
    """Return one output of each request whose tokens are unreported, and forget them."""
    rest: dict[str, Unreported] = vars(scheduler).pop("unreported", {})
    return [output_of(scheduler, scheduler.requests[name], new) for name, new in rest.items()]


def output_of(scheduler: Any, request: Any, new: Unreported, finish_reason: Any = None) -> Any:
    """Return the output that vLLM's processor takes for these tokens in one step."""
    import numpy
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    log_probs, stats = None, request.take_prefill_stats()
    if stats is not None:
        stats.finalize(scheduler.kv_cache_manager.estimate_cached_tokens(request))
    if new.log_probs:
        ids, values = numpy.array(new.token_ids), numpy.array(new.log_probs, dtype=numpy.float32)
        log_probs = LogprobsLists(ids[:, None], values[:, None], numpy.array(new.ranks))
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new.token_ids,
        finish_reason=finish_reason,
        new_logprobs=log_probs,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        prefill_stats=stats,
    )


def reports_tokens_alone(scheduler: Any) -> bool:
    """Whether steps of this engine have only tokens and log-probs to report."""
    config = scheduler.vllm_config
    others = (scheduler.connector, scheduler.ec_connector, scheduler.aux_output_connector, config.speculative_config)
    return (
        not any(other is not None for other in others)
        and not (scheduler.log_stats or scheduler.defer_block_free or scheduler.return_sampling_mask)
        and not (scheduler.is_mm_encoder_only or scheduler.use_pp or scheduler.scheduler_config.async_scheduling)
        and scheduler.finished_req_ids_dict is None
        and not scheduler.kv_cache_manager.block_pool.enable_kv_cache_events
    )


def has_tokens_alone(scheduler: Any, step: Any, output: Any) -> bool:
    """Whether this step has only tokens and log-probs to report. step, output: of vLLM's scheduler and runner."""
    log_probs = output.logprobs
    return not (
        output.pooler_output
        or output.prompt_logprobs_dict
        or output.prompt_token_id_logprobs_dict
        or output.num_nans_in_logits
        or step.has_structured_output_requests
        or scheduler.grammar_compile_error_reqs
        or scheduler.encoder_cache_mismatch_reqs
        or (log_probs is not None and log_probs.logprobs.shape[1] != 1)
    )


def append_step(scheduler: Any, step: Any, output: Any) -> list[Any]:
    """Append the tokens of a step to their requests; return the outputs of those that end, which leave the engine."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.utils import remove_all

    unreported: dict[str, Unreported] = vars(scheduler).setdefault("unreported", {})
    named: dict[str, None] = vars(scheduler).setdefault("named", {})
    rows, ended, outputs = output.logprobs, set(), []
    log_probs, ranks = ([], []) if rows is None else (rows.logprobs[:, 0].tolist(), rows.sampled_token_ranks.tolist())
    for name, num_tokens in step.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        request.num_in_flight_tokens -= num_tokens
        if request.has_encoder_inputs:
            scheduler._free_encoder_inputs(request)
        place = output.req_id_to_index[name]
        sampled = output.sampled_token_ids[place]
        if not sampled:  # a part of a prompt
            continue
        new = unreported.get(name)
        if new is None:
            new = unreported[name] = Unreported([], [], [])
            if request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
                named[name] = None
        sampled, is_last = scheduler._update_request_with_output(request, sampled)
        new.token_ids.extend(sampled)
        if rows is not None:
            new.log_probs.append(log_probs[place])
            new.ranks.append(ranks[place])
        if is_last:
            named[name] = None
            outputs.append(output_of(scheduler, request, unreported.pop(name), request.get_finished_reason()))
            ended.add(request)
            scheduler._handle_stopped_request(request)
            scheduler._free_request(request)
    if ended:
        scheduler.running = remove_all(scheduler.running, ended)
    return outputs


def apply() -> None:
    """Replace two methods of the scheduler and one that reads log-probs; before requests are scheduled."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    usual, free, read = Scheduler.update_from_output, Scheduler._free_request, LogprobsProcessor._update_sample_logprobs
    if usual.__module__ == __name__:
        return

    @functools.wraps(usual)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not (reports_tokens_alone(self) and has_tokens_alone(self, scheduler_output, model_runner_output)):
            before = rest_of(self)
            reported = usual(self, scheduler_output, model_runner_output)
            if before:
                now = reported.setdefault(0, EngineCoreOutputs(outputs=[]))
                now.outputs = [*before, *now.outputs]
            return reported
        outputs = append_step(self, scheduler_output, model_runner_output)
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    @functools.wraps(free)
    def _free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).get("unreported", {}).pop(request.request_id, None)
        return free(self, request, *args, **kwargs)

    @functools.wraps(read)
    def _update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
        values, kept = logprobs_lists.logprobs, self.logprobs
        if self.tokenizer is not None or values.shape[1] != 1 or not isinstance(kept, FlatLogprobs):
            read(self, logprobs_lists)
            return
        places = range(len(kept.logprobs), len(kept.logprobs) + len(values))
        kept.start_indices.extend(places)
        kept.end_indices.extend(place + 1 for place in places)
        kept.token_ids.extend(logprobs_lists.logprob_token_ids[:, 0].tolist())
        kept.logprobs.extend(values[:, 0].tolist())
        kept.ranks.extend(logprobs_lists.sampled_token_ranks.tolist())
        kept.decoded_tokens.extend([None] * len(values))
        for value in values[:, 0].tolist():
            self.cumulative_logprob += value

    for function in (update_from_output, _free_request, _update_sample_logprobs):
        function.__module__ = __name__
    Scheduler.update_from_output, Scheduler._free_request = update_from_output, _free_request
    LogprobsProcessor._update_sample_logprobs = _update_sample_logprobs


PATCH = Patch(VLLM, apply, drop_when="vLLM makes no output of a request's step that nobody reads (FINAL_ONLY)")
