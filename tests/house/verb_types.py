"""What a type checker sees of a remote method: the controller's side, so that a wrong call is an error before a run.

`make lint` reads this file, and nothing runs it. A wrong line says with `type: ignore` which fault it has; the checker
reports a line that has another fault, or none (`warn_unused_ignores`). It does not see a method that a rank calls as if
it were remote; whether a handle's answers are what their types say, the tests of pools prove.
"""

from __future__ import annotations

from megatron_rl.controller.run import Run
from megatron_rl.dispatch import Future
from megatron_rl.records import Batch, Sampling
from megatron_rl.roles.transfer_address import TransferAddress


def right(run: Run, batch: Batch) -> None:
    """Calls without a fault."""
    metrics: Future[dict[str, float]] = run.roles.actor.update(batch)
    scores: Future[Batch] = run.roles.actor.log_probs(batch)
    address: Future[TransferAddress] = run.roles.actor.offer_transfer(4)
    reasons: Future[list[str]] = run.roles.actor.join_transfer(address.get())
    del metrics, scores, reasons


def wrong(run: Run, batch: Batch, sampling: Sampling) -> None:
    """Each line has one fault: another record, no argument, an answer that was not waited for, an unknown method, and a
    role that a run may lack.
    """
    run.roles.actor.update(sampling)  # type: ignore[arg-type]
    run.roles.actor.update()  # type: ignore[call-arg]
    _ = run.roles.actor.update(batch)[0]  # type: ignore[index]
    _ = run.roles.actor.log_probs(batch)["old_log_probs"]  # type: ignore[index]
    run.roles.actor.upgrade(batch)  # type: ignore[attr-defined]
    run.roles.critic.values(batch)  # type: ignore[union-attr]
