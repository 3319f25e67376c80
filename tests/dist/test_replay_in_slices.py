"""Experts that an engine reports slice by slice: of turns, of conversations, and of tokens that it reads again.

Routers are made to tie, as in `replay_observations.py`: without replay the trainer sends tokens to other experts than
the engine did, and so does an engine that reads tokens again in another shape.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM
from routed_experts import BOUND, REPLAY, tied_config
from tiny_models import save_qwen3_moe, tie_routers

from megatron_rl.agents.episode import Episode, EpisodeLimits, Reply, rows_of
from megatron_rl.agents.observation import Observation, Turn
from megatron_rl.columns import ACTOR_SCORES
from megatron_rl.records import row_lengths
from megatron_rl.rollout.slices import Slice

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

BLOCK, TURN, OBSERVED = 32, 12, (5, 6, 7)
"""Tokens of a block of the cache, of a turn, and between two turns."""
LENGTHS = (BLOCK - TURN + 1, 2 * BLOCK - TURN + 1, 4 * BLOCK - TURN + 1)
"""Of prompts: what the engine has read at the end of the first turn fills blocks."""
SAMPLED = dataclasses.replace(RANDOM, max_tokens=2 * TURN + len(OBSERVED), with_experts=True)


class Played:
    """Episodes on one rank's engine, each a turn of `TURN` tokens, which is cut off there, and another one."""

    def __init__(self, config) -> None:
        from megatron_rl.roles.host import RankHost
        from megatron_rl.rollout.seeds import request_seed
        from megatron_rl.sampling.in_flight import start_of

        self.host = RankHost(config)
        self.host.build("actor")
        self.host.build("rollout")
        self.host.roles["rollout"].generator.requests._eos_token_ids = ()  # no turn ends early
        self._seed_of, self._start_of = partial(request_seed, 1), start_of
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(2, 70, (length,), generator=generator).tolist() for length in LENGTHS for _ in range(3)]
        self.episodes = [Episode(tuple(ids), {"index": n, "sample": 0}, SAMPLED) for n, ids in enumerate(rows)]

    def advance(self, num_steps: int | None, version: int = 0, starts: bool = False) -> None:
        """starts: every episode begins again with all that it has."""
        engine = self.host.roles["rollout"].generator
        own = [(n, e) for n, e in enumerate(self.episodes) if starts and not e.finish]
        first = tuple(self._start_of(n, e, self._seed_of) for n, e in own)
        drops = engine.requests.unfinished if starts or num_steps == 0 else ()
        drawn, _ = engine.advance(Slice(version, num_steps, first, drops, keeps_prefixes=True))
        for number, new in drawn.items():
            self.episodes[number].extend(new, version, has_turns=False)

    def answer(self, is_anew: bool) -> None:
        for episode in self.episodes:
            episode.waits, episode.finish = True, ""
            episode.take(Reply(Turn(""), Observation(()), OBSERVED, is_anew), EpisodeLimits(9))

    def differences(self) -> list[dict]:
        """Of every episode, the engine's log-probs against the trainer's: of the first turn, and of the second one."""
        rows, actor = rows_of(self.episodes, with_versions=False, has_turns=False), self.host.roles["actor"]
        columns = rows.read_by(ACTOR_SCORES)
        found = [{"read": row_lengths(rows["routed_experts"])[n]} for n in range(len(self.episodes))]
        for name, score in (("with", actor.log_probs), ("without", actor.log_probs_without_replay)):
            apart = score(columns).flat("old_log_probs") - rows.flat("rollout_log_probs")
            for each, values in zip(found, apart.abs().split(rows.num_sampled.tolist()), strict=True):
                each[name] = [float(part.max()) for part in values.split([TURN, len(values) - TURN])]
        return found


def turns(config, is_anew: bool, version: int) -> list[dict]:
    """In slices of several lengths. version: of the second turn, with the weights of the first."""
    played = Played(config)
    played.host.roles["rollout"].enter()
    played.advance(5, starts=True)
    played.advance(4)
    played.advance(3)
    played.answer(is_anew)
    played.advance(2, version, starts=True)
    played.advance(None, version)
    played.host.roles["rollout"].exit()
    lengths = [len(e.prompt_ids) + len(e.token_ids) for e in played.episodes]
    return [each | {"length": length} for each, length in zip(played.differences(), lengths, strict=True)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return tie_routers(save_qwen3_moe(tmp_path_factory.mktemp("tied"), initializer_range=0.3))


def config_of(path: str, **changes):
    return tied_config(path, data__max_response_length=40, data__max_prompt_length=152, **{REPLAY: "R3"} | changes)


CASES = {"turns": (False, 0), "conversations": (True, 0), "read again": (False, 1)}


@pytest.mark.parametrize("case", CASES)
def test_experts_are_those_of_the_first_time(case: str, tied: str) -> None:
    """Log-probs agree with the engine's by replay, and not without. Where the engine has the first turn's keys and
    values, and in a conversation that begins again, those of both turns; where it reads the turn again, those of the
    first, whose experts stay. Of each conversation the engine reads all tokens but the last.

    Would not catch experts of the wrong layer: `tests/parity` does.
    """
    is_anew, version = CASES[case]
    [found] = run_ranks(1, turns, config_of(tied), is_anew, version)
    for each in found:
        assert each["read"] == each["length"] - (2 if is_anew else 1)
        assert min(each["without"]) > 100 * BOUND
        assert each["with"][0] < BOUND and (each["with"][1] < BOUND or version > 0)
    assert (max(each["with"][1] for each in found) > BOUND) == (version > 0)


def squeezed(config) -> tuple[list[dict], set[int]]:
    """One turn of all, in slices; and the requests of which the engine has given up keys and values."""
    from vllm.v1.core.sched.scheduler import Scheduler

    played, given_up, own = Played(config), set(), Scheduler._preempt_request

    def counted(scheduler, request, *args, **kwargs) -> None:
        given_up.add(int(request.request_id.partition("-")[0]))
        own(scheduler, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    played.host.roles["rollout"].enter()
    played.advance(4, starts=True)
    for _ in range(7):
        played.advance(3)
    played.advance(None)
    played.host.roles["rollout"].exit()
    return played.differences(), given_up


def test_a_cache_that_is_too_small(tied: str) -> None:
    """Prompts that are read in parts, and requests that lose their keys and values: a token has its experts once. Those
    of requests that lose nothing make log-probs agree.

    Would not catch experts of tokens that are read again, which no column has.
    """
    small = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 40}
    keys = {f"actor_rollout_ref__rollout__{name}": value for name, value in small.items()}
    [(found, given_up)] = run_ranks(1, squeezed, config_of(tied, **keys))
    assert 0 < len(given_up) < len(found)
    for number, each in enumerate(found):
        assert each["read"] == LENGTHS[number // 3] + SAMPLED.max_tokens - 1
        assert number in given_up or max(each["with"]) < BOUND
