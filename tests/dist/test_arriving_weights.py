"""Real engines in pools of their own: weights arrive while slices go on, one replica is killed, the other goes on.

An actor, and two replicas, each of which is a world by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from joined_pools import killed_after
from pool_messages import TIMEOUT_S, Messages, host_of
from ranks import run_ranks
from sliced_checks import in_slices, joined, largest_difference, nudge, plain_log_probs, starts
from tiny_models import run_config, save_llama

from megatron_rl.rollout.slices import Slice

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]

BOUND = 5e-5
NUM_SWAPS = 20
LATE_S = 0.5
DIES, STAYS = 0, 1
"""Numbers of the replicas."""


def address_of(messages: Messages, name: str, first_receiver: int):
    from megatron_rl.roles.transfer_address import TransferAddress

    (text,) = messages.wait(name)
    file, num_receivers = text.split()
    return TransferAddress("127.0.0.1", 0, 1, int(num_receivers), first_receiver, file)


@contextmanager
def late(sender, late_s: float, wait: Callable[[], object]):
    """Meanwhile the first message of a transfer leaves only so many seconds after `wait` has returned."""
    sends = sender.send

    def send(*arguments):
        wait()
        time.sleep(late_s)
        return sends(*arguments)

    sender.send = send
    yield
    sender.send = sends


def trains(config, messages: Messages, exported: Path, tp_size: int) -> dict:
    """Send versions 0, 1, 2, ...; version v's weights are nudged v times, and some are exported."""
    host = host_of(config, "global_pool", 0, 1, "training")
    host.build("actor")
    actor = host.roles["actor"]
    parameters = list(actor.trainable.pipeline.parameters())

    def offer(name: str, num_receivers: int) -> None:
        address = actor.offer_transfer(num_receivers)
        messages.say(name, f"{address.file} {num_receivers}")
        broken = actor.join_transfer(address)
        assert not broken, broken

    def next_version(version: int) -> None:
        nudge(parameters, seed=version)
        if version in (1, NUM_SWAPS + 2):
            actor.export_hf(exported / str(version))

    def all_say(what: str) -> None:
        messages.wait(*(f"{what} {number}.{tp_rank}" for number in (DIES, STAYS) for tp_rank in range(tp_size)))

    attempts = []

    def send(version: int, holding: dict[int, int], late_s: float = 0.0, after: str | None = None) -> None:
        """late_s: from the call of the ranks that listen to the first message, or from when all have said `after`."""
        with late(actor.sending.sender, late_s, lambda: after is None or all_say(after)):
            attempts.append(actor.try_send_weights(version, holding))
        messages.say(f"sent {version}")

    offer("first transfer", 2 * tp_size)
    send(0, {})
    concluded = attempts[0].concluded
    next_version(1)
    all_say("slices of")
    send(1, {DIES: 0, STAYS: 0}, LATE_S)
    for version in range(2, NUM_SWAPS + 2):
        next_version(version)
        holding = {DIES: version - 1, STAYS: version - 1}
        if version == 2:
            all_say("waits")
            send(version, holding, LATE_S, after="asks")
        else:
            send(version, holding)
    next_version(NUM_SWAPS + 2)
    begin = time.monotonic()
    send(NUM_SWAPS + 2, {DIES: NUM_SWAPS + 1, STAYS: NUM_SWAPS + 1}, LATE_S)
    seconds = time.monotonic() - begin
    offer("second transfer", tp_size)
    send(NUM_SWAPS + 2, {STAYS: NUM_SWAPS + 1})
    messages.say("sent again")
    messages.wait(*(f"spoilt {tp_rank}" for tp_rank in range(tp_size)))
    send(NUM_SWAPS + 3, {STAYS: NUM_SWAPS + 2})
    messages.wait("done")
    said = [(one.version, one.broken, one.report is None) for one in attempts]
    return {"attempts": said, "seconds": seconds, "concluded": concluded}


def refused(call, *arguments) -> str:
    with pytest.raises(RuntimeError) as raised:
        call(*arguments)
    return str(raised.value)


def until(is_true) -> None:
    """Wait for what the thread does; the test's own time-out ends it."""
    while not is_true():
        time.sleep(0.001)


def overlapping(rollout, messages: Messages, number: int, tp_rank: int, found: dict) -> None:
    """Slices of version 0 while version 1 comes; then version 1 for all requests anew."""
    first, generator = starts(0), rollout.generator
    found["whole"] = in_slices(generator, first, None)
    found["no method"] = refused(rollout.receive_weights)
    parts = [rollout.advance({number: Slice(0, 3, first)}).drawn]
    messages.say(f"slices of {number}.{tp_rank}")
    arrivals = rollout.weights.arrivals
    found["beside"] = 0
    until(lambda: arrivals._is_arriving)
    while generator.requests.unfinished:
        found["beside"] += arrivals._is_arriving
        parts.append(rollout.advance({number: Slice(0, 1)}).drawn)
        time.sleep(0.02)
    found["in slices"] = joined(parts)
    messages.wait("sent 1")
    report = rollout.advance({number: Slice(1, None, first)})
    found["version 1"] = report.drawn
    found["report"] = (report.replica, report.version, report.broken, 0 <= report.swap_seconds < TIMEOUT_S)
    found["never sent"] = refused(rollout.advance, {number: Slice(99, 1)})


def swaps(rollout, messages: Messages, number: int, tp_rank: int, found: dict) -> None:
    """Version after version; the second is named while it comes, the third long after the fourth was called for."""
    parameters = dict(rollout.generator.model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    arrivals, receiver = rollout.weights.arrivals, rollout.weights.receiver
    for version in range(2, NUM_SWAPS + 2):
        if version == 2:
            messages.say(f"waits {number}.{tp_rank}")
            until(lambda: arrivals._is_arriving)
            messages.say(f"asks {number}.{tp_rank}")
        else:
            messages.wait(f"sent {version}")
        if version == 3:
            until(lambda: arrivals._is_arriving)
            time.sleep(LATE_S)
            found["not overwritten"] = (receiver.version, receiver.arrived)
        report = rollout.advance({number: Slice(version, 1)})
        assert (report.version, report.broken, receiver.version) == (version, "", version)
        if version == 2:
            found["waited"] = report.swap_seconds
    found["stays"] = addresses == {name: parameter.data_ptr() for name, parameter in parameters.items()}


def receives(config, messages: Messages, number: int, tp_rank: int, tp_size: int) -> dict:
    from megatron_rl.roles.transfer_address import TransferSettings

    host = host_of(config, "rollout_pool", tp_rank, tp_size, f"replica_{number}")
    host.build("rollout", TransferSettings(first_replica=number, second_buffer=True))
    assert host.roles["rollout"].join_transfer(address_of(messages, "first transfer", number * tp_size)) == ""
    rollout, found, last = host.roles["rollout"], {}, NUM_SWAPS + 1
    found["before any"] = rollout.advance({}).version
    messages.wait("sent 0")
    rollout.enter()
    found["memory"] = host.owned_memory()
    overlapping(rollout, messages, number, tp_rank, found)
    swaps(rollout, messages, number, tp_rank, found)
    if number == DIES:
        killed_after(rollout.weights.receiver._joined.transport, 1)
        time.sleep(TIMEOUT_S)
    # Version 22 breaks; the requests go on with version 21, and with 22 once it has come in another transfer.
    first = starts(0)
    kept = [rollout.advance({number: Slice(last, 2, first)}).drawn]
    arrivals = rollout.weights.arrivals
    until(lambda: arrivals._broken)
    found["broken"] = arrivals._broken
    kept.append(rollout.advance({number: Slice(last, 2)}).drawn)
    assert rollout.join_transfer(address_of(messages, "second transfer", 0)) == ""
    messages.wait("sent again")
    report = rollout.advance({number: Slice(last + 1, None)})
    found["after"] = (report.replica, report.version, report.broken)
    found["kept"] = joined([*kept, report.drawn])
    found["anew"] = rollout.advance({number: Slice(last + 1, None, first)}).drawn
    # From here on every transfer finds a wrong weight.
    rollout.weights.receiver.receive = mismatch
    messages.say(f"spoilt {tp_rank}")
    until(lambda: arrivals._failure is not None and not arrivals._is_arriving)
    found["next methods"] = [
        refused(rollout.advance, {number: Slice(last + 1, 1)}),
        refused(rollout.join_transfer, None),
    ]
    rollout.exit()
    messages.say("done")
    return found


def mismatch(*arguments) -> None:
    from megatron_rl.hybrid_engine.verify import WeightMismatchError

    raise WeightMismatchError("rollout rank 0: a tensor differs")


def one_rank(config, exported: Path, tp_size: int) -> dict:
    rank = int(os.environ["RANK"])
    messages = Messages()
    if rank == 0:
        return trains(config, messages, exported, tp_size)
    number, tp_rank = divmod(rank - 1, tp_size)
    return receives(config, messages, number, tp_rank, tp_size)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["TP1", "TP2"])
def ranks(request, tmp_path_factory):
    """What the actor and a rank of the replica that stays say; exported versions of the weights."""
    folder, tp_size = tmp_path_factory.mktemp("arriving"), request.param
    path = save_llama(folder / "model", eos_token_id=69)
    rollout = "actor_rollout_ref__rollout__"
    keys = {"actor_rollout_ref__hybrid_engine": False, f"{rollout}tensor_model_parallel_size": tp_size}
    keys |= {f"{rollout}nnodes": 1, f"{rollout}n_gpus_per_node": 2 * tp_size, "trainer__n_gpus_per_node": 1}
    keys |= {"algorithm__use_kl_in_reward": False, "critic__enable": False}
    config = run_config(path, 1, 1, **keys)
    lost = range(1, 1 + tp_size)
    found = run_ranks(1 + 2 * tp_size, one_rank, config, folder / "exported", tp_size, timeout=120, lost=lost)
    for rank in found[1 + tp_size :]:
        assert rank["kept"] == found[-1]["kept"] and rank["in slices"] == found[-1]["in slices"]
    return path, folder / "exported", found[0], found[-1]


def test_slices_go_on_while_weights_arrive(ranks) -> None:
    """What is drawn before the swap does not change by a bit; afterwards it is the sent weights', by transformers.

    Would not catch a slice that is slower for it.
    """
    _, exported, _, rollout = ranks
    assert rollout["before any"] == -1 and rollout["beside"] >= 1
    assert rollout["in slices"] == rollout["whole"] != rollout["version 1"]
    assert rollout["report"] == (STAYS, 1, "", True)
    for start in starts(0):
        drawn = rollout["version 1"][start.request]
        expected = plain_log_probs(str(exported / "1"), start.token_ids, drawn.token_ids)
        assert largest_difference(drawn.log_probs, expected) < BOUND


def test_a_second_buffer_is_accounted_for(ranks) -> None:
    """Its bytes, and those that came. Would not catch memory that torch takes beside it."""
    _, _, training, rollout = ranks
    memory = rollout["memory"]
    assert memory["arriving weights"] == memory["rollout weights"] > 0
    assert len(training["concluded"]) >= 2
    for transition in training["concluded"]:
        assert 0 < transition.bytes_received == transition.lower_bound_bytes <= memory["arriving weights"]


def test_swaps_wait_for_their_version_and_keep_addresses(ranks) -> None:
    """20 of them, one named half a second before it has come. Would not catch a graph that reads elsewhere."""
    _, _, _, rollout = ranks
    assert rollout["stays"] and 0.5 * LATE_S < rollout["waited"] < TIMEOUT_S / 2


def test_weights_that_a_slice_will_name_are_not_overwritten(ranks) -> None:
    """The next ones wait until they are taken. Would not catch a controller that does not say what was named."""
    _, _, _, rollout = ranks
    assert rollout["not overwritten"] == (2, 3)


def test_what_cannot_be_is_refused(ranks) -> None:
    """With a reason. Would not catch a refusal that leaves a thread behind."""
    _, _, _, rollout = ranks
    assert rollout["no method"] == "weights arrive during generation here: training asks for them"
    assert rollout["never sent"] == "a slice asks for version 99 of the weights; here is 1, and None has arrived"


def test_an_error_in_the_thread_is_that_of_the_next_methods(ranks) -> None:
    """By its name and text, and it stays; training does not wait for this rank. Would not catch a thread that never
    ends, which the group's time-out does.
    """
    _, _, training, rollout = ranks
    said = "weights that arrived during generation: WeightMismatchError: rollout rank 0: a tensor differs"
    assert rollout["next methods"] == [said, said]
    assert training["attempts"][-1][1].startswith("training rank 0: a transfer of weights broke: ")


def test_a_killed_replica_breaks_one_transfer_and_no_more(ranks) -> None:
    """The actor answers long before its time-out; the other replica keeps weights and requests, joins anew, and ends
    with the bytes that were sent, by transformers. Would not catch a machine that goes silent.
    """
    _, exported, training, rollout = ranks
    *good, broken, again, _ = training["attempts"]
    assert good == [(version, "", False) for version in range(NUM_SWAPS + 2)] and training["seconds"] < TIMEOUT_S / 4
    last = NUM_SWAPS + 1
    assert broken[0] == last + 1 and broken[1].startswith("training rank 0: a transfer of weights broke: ")
    assert again == (last + 1, "", False)
    assert rollout["broken"].startswith("a transfer of weights broke: ")
    assert rollout["after"] == (STAYS, last + 1, "")
    assert all(rollout["kept"][start.request].finish for start in starts(0))
    for start in starts(0):
        drawn = rollout["anew"][start.request]
        expected = plain_log_probs(str(exported / str(last + 1)), start.token_ids, drawn.token_ids)
        assert largest_difference(drawn.log_probs, expected) < BOUND
