"""Faults that rounding hides, and that `rollout.bitwise` shows. Rows of tests/parity show that nothing else does."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, logprob_difference, round_trip
from tiny_models import run_config, save_qwen2

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

KEYS = {"actor_rollout_ref__rollout__bitwise": True}


def differences(config) -> dict[str, float]:
    """Largest log-prob difference of engine and trainer with each fault; "none": without."""
    from megatron_rl.model import attention, bitwise
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    answers, _ = round_trip(worker, RANDOM)
    found = {"none": logprob_difference(worker, answers)}
    used_token = int(answers["input_ids"].unbind()[0][0])
    for name, weight in worker.roles["actor"].trainable.models[0].named_parameters():
        row = weight.data[used_token % len(weight)].view(-1)
        largest = int(row.abs().argmax())
        element = row[largest : largest + 1]
        kept = element.clone()
        element.mul_(1 + 1e-5)
        found[name] = logprob_difference(worker, answers)
        element.copy_(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "turns_of", later_by_one(attention.turns_of))
        found["positions"] = logprob_difference(worker, answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitwise, "attention", without_first_key(bitwise.attention))
        found["mask"] = logprob_difference(worker, answers)
    layer = next(each for each in worker.roles["rollout"].generator.model.modules() if hasattr(each, "kv_cache"))
    layer.impl.do_kv_cache_update = stale_slot(layer.impl.do_kv_cache_update)
    found["block"] = logprob_difference(worker, round_trip(worker, RANDOM)[0])
    return found


def later_by_one(turns_of):
    """Rotate the tokens of the first segment by the angles of their next positions."""

    def turned(angles, segments):
        if segments.turns is None:
            segments.positions[: int(segments.cu_seqlens_q[1])] += 1
        return turns_of(angles, segments)

    return turned


def without_first_key(attend):
    """Hide the first key from one query of the first tile: the last one."""

    def attended(query, key, value, first):
        out = attend(query, key, value, first)
        out[0, -1] = attend(query, key.roll(-1, 1), value.roll(-1, 1), first - 1)[0, -1]
        return out

    return attended


def stale_slot(store):
    """Keep in the first written slot a value that is too large by 1e-5 of it."""

    def stored(layer, key, value, kv_cache, slot_mapping):
        store(layer, key, torch.cat([value[:1] * (1 + 1e-5), value[1:]]), kv_cache, slot_mapping)

    return stored


def test_every_fault_shows(tmp_path) -> None:
    """A weight too large by 1e-5 of it, positions late by one in one row, which attention as such does not see, a key
    that one query misses, and a block of the cache that is off by 1e-5. Would not catch a fault on both sides.
    """
    (found,) = run_ranks(1, differences, run_config(save_qwen2(tmp_path), 1, 1, **KEYS))
    assert found.pop("none") == 0.0
    hidden = {name for name, far in found.items() if far == 0.0}
    assert hidden == set(), found
    assert max(far for name, far in found.items() if name != "mask") < 5e-5, "rounding would not hide it"
