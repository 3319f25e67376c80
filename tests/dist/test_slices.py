"""vLLM advanced in counted slices, on real engines that read the actor's memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ranks import run_ranks
from sliced_checks import (
    SAMPLED,
    in_slices,
    joined,
    kept_log_probs,
    largest_difference,
    nudge,
    plain_log_probs,
    resumed,
    starts,
)
from tiny_models import run_config, save_llama

from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Drawn, Slice, Start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

SLICE_STEPS = (1, 3, 7)
NUM_OLD = 6
"""Tokens before the weights change."""
BOUND = 5e-5
BLOCK = 128
"""Tokens of a block of the cache on a CPU: vLLM's."""


def host_of(config):
    from megatron_rl.roles.host import RankHost

    host = RankHost(config)
    host.build("actor")
    host.build("rollout")
    return host


def refused(call, *arguments) -> str:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call(*arguments)
    return str(raised.value)


def by_vllm(generator, first) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs of each request by vLLM's own `generate`, which steps the engine itself."""
    from vllm.sampling_params import RequestOutputKind

    from megatron_rl.rollout.in_flight_requests import forget_prefixes, sampling_params, token_log_probs

    forget_prefixes(generator.llm.llm_engine)
    ends = generator.requests._eos_token_ids
    params = [
        sampling_params(start.sampling, start.seed, ends, start.max_tokens, RequestOutputKind.FINAL_ONLY)
        for start in first
    ]
    prompts = [{"prompt_token_ids": list(start.token_ids)} for start in first]
    answers = [answer.outputs[0] for answer in generator.llm.generate(prompts, params, use_tqdm=False)]
    return {
        start.request: (list(answer.token_ids), token_log_probs(answer))
        for start, answer in zip(first, answers, strict=True)
    }


def sliced_rank(config) -> dict:
    """Answers of vLLM's `generate`, of one slice, of slices of several lengths, and after a full engine was emptied."""
    host = host_of(config)
    rollout, first = host.roles["rollout"], starts(config.trainer.seed)
    found = {"train mode": refused(rollout.advance, {0: Slice(0, 1, first)})}
    rollout.enter()
    generator = rollout.generator
    found["generated"] = by_vllm(generator, first)
    report = rollout.advance({0: Slice(0, None, first), 5: Slice(9, 1)})
    found["report"] = dataclasses.replace(report, start=0.0, stop=0.0, swap_seconds=0.0)
    found["times"] = report.stop - report.start, report.swap_seconds
    found["idle"] = rollout.advance({7: Slice(0, 1, first)})
    found["slices"] = {num_steps: in_slices(generator, first, num_steps) for num_steps in SLICE_STEPS}
    found["other version"] = refused(rollout.advance, {0: Slice(1, 1)})

    # An engine full of other requests, all dropped in the slice that starts these.
    other = [dataclasses.replace(start, request=start.request - 90, seed=5, max_tokens=24) for start in first]
    generator.advance(Slice(0, 3, tuple(other[1:])))
    generator.advance(Slice(0, 2, tuple(other[:1]), (12,)))
    found["unfinished"] = generator.requests.unfinished
    found["unknown drop"] = refused(generator.advance, Slice(0, 1, (), (12,)))
    found["second start"] = refused(generator.advance, Slice(0, 1, tuple(other[:1])))
    found["dropped twice"] = refused(generator.advance, Slice(0, 1, (), (11, 11)))
    found["sleep"] = refused(generator.sleep)
    found["exit"] = refused(rollout.exit)
    found["still unfinished"] = generator.requests.unfinished
    drawn, _ = generator.advance(Slice(0, None, first, tuple(generator.requests.unfinished)))
    found["after drops"] = drawn

    # Answers of one token: by their length, and because it is the end token.
    short = [dataclasses.replace(start, max_tokens=1) for start in first]
    found["short"] = generator.advance(Slice(0, 5, tuple(short)))
    end = found["short"][0][100].token_ids[0]
    ends, generator.requests._eos_token_ids = generator.requests._eos_token_ids, [end]
    found["end"] = generator.advance(Slice(0, 5, first[:1]))
    generator.requests._eos_token_ids = ends
    rollout.exit()
    rollout.enter()
    found["again"] = rollout.advance({0: Slice(0, None, first)}).drawn
    rollout.exit()
    return found


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.exhaustive), 2], ids=["TP1", "TP2"])
def sliced(request, tmp_path_factory):
    path = save_llama(tmp_path_factory.mktemp("sliced") / "model")
    return run_ranks(request.param, sliced_rank, run_config(path, request.param, 1), timeout=90)


def test_slices_draw_what_one_call_draws(sliced) -> None:
    """Tokens and log-probs bit for bit, by vLLM's own `generate`, in one slice and in many.

    Would not catch an engine that draws wrong in all of them alike; nor one that depends on which requests run
    together, which these do not change.
    """
    for rank in sliced:
        whole = rank["report"].drawn
        assert {request: (list(new.token_ids), list(new.log_probs)) for request, new in whole.items()} == rank[
            "generated"
        ]
        assert all(rank["slices"][num_steps] == whole for num_steps in SLICE_STEPS)
        assert rank["after drops"] == whole
        assert rank["again"] == whole
        assert rank["report"].num_steps == max(len(new.token_ids) for new in whole.values()) > max(SLICE_STEPS)
        assert {new.finish for new in whole.values()} <= {FINISHED_BY_LENGTH, FINISHED_BY_STOP}
        assert all(
            (len(new.token_ids) == SAMPLED.max_tokens) or new.finish == FINISHED_BY_STOP for new in whole.values()
        )


def test_ranks_of_a_replica_report_the_same(sliced) -> None:
    """Everything that was drawn. Would not catch ranks whose engines hold different blocks for the same tokens."""
    assert all(rank["slices"] == sliced[0]["slices"] and rank["report"] == sliced[0]["report"] for rank in sliced)


def test_a_replica_runs_its_own_slice_only(sliced) -> None:
    """By its number; without one it reports no steps. Would not catch a number that two replicas share."""
    for rank in sliced:
        assert rank["report"].replica == 0 and rank["report"].version == 0
        seconds, swap_seconds = rank["times"]
        assert 0 <= swap_seconds < seconds < 60
        idle = rank["idle"]
        assert (idle.replica, idle.version, idle.num_steps, idle.drawn) == (0, 0, 0, {})


def test_answers_of_one_token(sliced) -> None:
    """By length and by end token, in one engine step. Would not catch an end token inside a longer answer that is
    passed over, which the comparison with `generate` does.
    """
    for rank in sliced:
        drawn, num_steps = rank["short"]
        assert num_steps == 1 and {new.finish for new in drawn.values()} == {FINISHED_BY_LENGTH}
        assert all(new.token_ids == rank["report"].drawn[request].token_ids[:1] for request, new in drawn.items())
        drawn, num_steps = rank["end"]
        (only,) = drawn.values()
        assert num_steps == 1 and only.finish == FINISHED_BY_STOP
        assert only.token_ids == rank["report"].drawn[100].token_ids[:1]


def test_what_cannot_be_done_is_refused_and_changes_nothing(sliced) -> None:
    """Drops, starts, modes. Would not catch a refusal on one rank alone."""
    for rank in sliced:
        assert rank["train mode"] == "a slice in train mode: enter() comes first"
        assert rank["other version"] == "a slice with version 1 where generation reads version 0 in place"
        assert rank["unfinished"] == rank["still unfinished"] == (11, 13, 10)
        assert rank["unknown drop"] == "request 12 cannot be dropped: unfinished here are [10, 11, 13]"
        assert rank["second start"] == "request 10 cannot be started: it is unfinished here"
        assert rank["dropped twice"] == "request 11 cannot be dropped: unfinished here are [10, 13]"
        assert rank["sleep"] == rank["exit"]
        assert rank["sleep"].startswith("the KV cache cannot go while requests are unfinished: 11, 13, 10")


def next_turn(generator, first: Start, keeps: bool) -> tuple[int, int, Drawn]:
    """(tokens that the first turn left, those that the second did not compute again, what the second drew)."""
    drawn = generator.advance(Slice(6, None, (dataclasses.replace(first, max_tokens=20),)))[0][first.request]
    whole = (*first.token_ids, *drawn.token_ids, 3, 4)
    second = dataclasses.replace(first, token_ids=whole, max_tokens=4)
    engine, cached = generator.llm.llm_engine, []
    step = engine.step

    def counted() -> list:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    engine.step = counted
    try:
        answer = generator.advance(Slice(6, None, (second,), keeps_prefixes=keeps))[0][first.request]
    finally:
        engine.step = step
    return len(first.token_ids) + len(drawn.token_ids), max(cached), answer


def changed_rank(config, exported: str) -> dict:
    """Weights changed between two slices, the requests kept or started anew; one process, whose actor is exported."""
    host = host_of(config)
    rollout, first = host.roles["rollout"], starts(config.trainer.seed)
    generator, actor = rollout.generator, host.roles["actor"]
    parameters = list(actor.trainable.pipeline.parameters())
    old = [parameter.detach().clone() for parameter in parameters]

    def put_back() -> None:
        for parameter, value in zip(parameters, old, strict=True):
            parameter.data.copy_(value)

    rollout.enter()
    found = {"unchanged": in_slices(generator, first, None)}
    before, _ = generator.advance(Slice(0, NUM_OLD, first))
    found["before"] = before
    nudge(parameters, seed=1)
    found["kept"] = joined([before, generator.advance(Slice(1, None))[0]])

    put_back()
    before, _ = generator.advance(Slice(0, NUM_OLD, first))
    nudge(parameters, seed=1)
    unfinished = generator.requests.unfinished
    anew = tuple(resumed(start, before[start.request], seed=9) for start in first if start.request in unfinished)
    found["recomputed"] = joined([before, generator.advance(Slice(1, None, anew, unfinished))[0]])

    # The longest prompt fills a block, which stays known while another request keeps the engine from being empty.
    for name, version in (("salted", 1), ("not salted", 0)):
        put_back()
        endless, longest = dataclasses.replace(first[0], request=7, max_tokens=100), first[3]
        once = dataclasses.replace(longest, max_tokens=1)
        generator.advance(Slice(0, 2, (endless, once)))
        nudge(parameters, seed=1)
        (answer,) = (new for request, new in generator.advance(Slice(version, 2, (once,)))[0].items() if request != 7)
        found[name] = answer
        generator.advance(Slice(version, 1, (), (7,)))

    # Nothing is left after this slice, so the next one begins with an empty cache even under the same version.
    put_back()
    in_slices(generator, first, None, version=5)
    nudge(parameters, seed=1)
    found["emptied"] = generator.advance(Slice(5, None, (once,)))[0][once.request]

    # A turn, and the next one of the same episode, in an engine that had nothing else to do.
    found["next turns"] = {keeps: next_turn(generator, longest, keeps) for keeps in (False, True)}
    rollout.exit()
    actor.export_hf(Path(exported))
    return found


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed")
    # No answer ends early: every request lives through the change.
    path = save_llama(folder / "model", eos_token_id=69)
    config = run_config(path, 1, 1, data__max_response_length=100, data__max_prompt_length=152)
    (found,) = run_ranks(1, changed_rank, config, str(folder / "exported"), timeout=90)
    return path, str(folder / "exported"), found


def test_a_change_between_slices_leaves_what_was_drawn(changed) -> None:
    """Tokens and log-probs before it are those of a run without it, after it they are not. Would not catch a change
    that comes some steps late, which the log-probs of the next tests do.
    """
    _, _, found = changed
    for start in starts(0):
        untouched = found["unchanged"][start.request]
        for name in ("kept", "recomputed"):
            drawn = found[name][start.request]
            assert drawn.token_ids[:NUM_OLD] == untouched.token_ids[:NUM_OLD]
            assert drawn.log_probs[:NUM_OLD] == untouched.log_probs[:NUM_OLD]
            assert len(drawn.token_ids) > NUM_OLD and drawn.log_probs[NUM_OLD:] != untouched.log_probs[NUM_OLD:]


def test_log_probs_are_those_of_the_version_they_are_stamped_with(changed) -> None:
    """Every token against transformers, fp32: by a plain forward where keys and values were recomputed, by a forward
    on the older version's where they were kept. Would not catch an error that transformers shares.
    """
    old, new, found = changed
    worst = {"kept": 0.0, "recomputed": 0.0, "kept, by a plain forward": 0.0}
    for start in starts(0):
        for name in ("kept", "recomputed"):
            drawn = found[name][start.request]
            before = plain_log_probs(old, start.token_ids, drawn.token_ids)[:NUM_OLD]
            plain = plain_log_probs(new, start.token_ids, drawn.token_ids)[NUM_OLD:]
            after = plain
            if name == "kept":
                after = kept_log_probs(old, new, start.token_ids, drawn.token_ids, NUM_OLD)
                difference = largest_difference(drawn.log_probs[NUM_OLD:], plain)
                worst["kept, by a plain forward"] = max(worst["kept, by a plain forward"], difference)
            worst[name] = max(worst[name], largest_difference(drawn.log_probs, before + after))
    print(worst)
    assert worst["kept"] < BOUND and worst["recomputed"] < BOUND
    assert worst["kept, by a plain forward"] > 10 * BOUND


def test_cached_prefixes_of_older_weights_are_not_used(changed) -> None:
    """A prompt that fills a block, asked again after a change: right under its own version, and wrong where it claims
    the older one, so the cache was there to be hit. Would not catch a block that outlives its version number.
    """
    old, new, found = changed
    prompt = starts(0)[3].token_ids
    salted, stale = found["salted"], found["not salted"]
    assert isinstance(salted, Drawn)
    assert largest_difference(salted.log_probs, plain_log_probs(new, prompt, salted.token_ids)) < BOUND
    assert largest_difference(stale.log_probs, plain_log_probs(new, prompt, stale.token_ids)) > 10 * BOUND


def test_a_turn_computes_new_tokens_and_a_block_again(changed) -> None:
    """A slice that keeps prefixes finds all but less than a block of what the turn before left, another one nothing;
    both draw the same. Would not catch an engine that drops blocks for want of memory.
    """
    _, _, found = changed
    (left, none, plain), (same, known, kept) = (found["next turns"][keeps] for keeps in (False, True))
    assert left == same > BLOCK and none == 0 and left - BLOCK < known <= left
    assert kept.token_ids == plain.token_ids and largest_difference(kept.log_probs, plain.log_probs) < BOUND


def test_an_engine_with_nothing_left_begins_with_an_empty_cache(changed) -> None:
    """The same prompt under the same version, with weights that changed all the same: no older key or value is used, so
    a slice does not depend on what was drawn and dropped before it. Would not catch other state of an engine, which the
    comparison after drops does.
    """
    _, new, found = changed
    prompt, drawn = starts(0)[3].token_ids, found["emptied"]
    assert largest_difference(drawn.log_probs, plain_log_probs(new, prompt, drawn.token_ids)) < BOUND


def ahead_rank(config) -> dict:
    """What `sliced_rank` finds, of an engine that schedules a step while another one runs."""
    host = host_of(config)
    rollout, first = host.roles["rollout"], starts(config.trainer.seed)
    rollout.enter()
    generator = rollout.generator
    running = generator.llm.llm_engine.engine_core.engine_core.batch_queue
    found = {"counted": refused(generator.advance, Slice(0, 3, first)), "steps": [], "running": []}

    def whole(*starts: Start, drops: tuple[int, ...] = ()) -> dict[int, Drawn]:
        drawn, num_steps = generator.advance(Slice(0, None, starts, drops))
        found["steps"].append(num_steps)
        found["running"].append(len(running))
        return drawn

    found["report"] = whole(*first)
    other = [dataclasses.replace(start, request=start.request - 90, seed=5) for start in first]
    generator.advance(Slice(0, 0, tuple(other)))
    found["after drops"] = whole(*first, drops=generator.requests.unfinished)
    found["short"] = whole(*(dataclasses.replace(start, max_tokens=1) for start in first))
    generator.requests._eos_token_ids = [found["short"][100].token_ids[0]]
    found["end"] = whole(first[0])
    rollout.exit()
    return found


@pytest.mark.parametrize("sliced", [2], indirect=True, ids=["TP2"])
def test_asynchronous_scheduling_draws_the_same(sliced, tmp_path) -> None:
    """Tokens, log-probs and ends, of answers that end by length, by an end token, and after others were dropped. No
    step is left that would read weights while they change; the patch is what lets an engine on a CPU do it.

    Would not catch a kernel that is still running when vLLM has reported its step: on a CPU none is.
    """
    key = "actor_rollout_ref__rollout__async_scheduling"
    config = run_config(save_llama(tmp_path / "model"), 2, 1, **{key: True})
    for ahead, plain in zip(run_ranks(2, ahead_rank, config, timeout=90), sliced, strict=True):
        assert ahead["report"] == ahead["after drops"] == plain["report"].drawn
        assert ahead["short"] == plain["short"][0] and ahead["end"] == plain["end"][0]
        assert ahead["steps"][0] > plain["report"].num_steps and ahead["running"] == [0, 0, 0, 0]
        assert "a slice of 3 engine steps needs an engine without asynchronous scheduling" in ahead["counted"]
