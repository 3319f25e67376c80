"""Sessions and sampling sessions of a tenant: how many there may be, and which leave."""

from __future__ import annotations

import json

from test_desk import MODEL, TRAINED, a_desk, opened, post, refusal_of, refusal_of_waiting, run_all

from megatron_rl.serve.desk import MOST_SESSIONS
from megatron_rl.serve.sampling_sessions import MOST_SAMPLERS


def test_a_tenant_has_so_many_sampling_sessions() -> None:
    """1,000, without those that a loop saves for; they end with their weights, and what was asked of them stays.

    Would not catch a slow one.
    """
    desk = opened(*TRAINED)
    post(desk, "save_weights_for_sampler", path="named", seq_id=4)
    run_all(desk)
    path = {"base_model": None, "model_path": f"tinker://{MODEL}/sampler_weights/named"}
    for number in range(1, MOST_SAMPLERS + 1):
        post(desk, "create_sampling_session", sampling_session_seq_id=number, **(path if number == 7 else {}))
    asked = {"sampling_session_id": "session-0:sample:7"}
    sampled = post(desk, "asample", **asked)
    run_all(desk)
    refusal = refusal_of(desk, "create_sampling_session", sampling_session_seq_id=number + 1)
    assert (refusal.status, refusal.field) == (429, "sampling_session") and str(MOST_SAMPLERS) in str(refusal)
    again = a_desk()
    again.restore(json.loads(json.dumps(desk.kept())))
    for one in (desk, again):
        post(one, "create_sampling_session", sampling_session_seq_id=number)
        post(one, "save_weights_for_sampler", seq_id=5, sampling_session_seq_id=number + 2)
        post(one, "delete_checkpoint", content=json.dumps({"path": path["model_path"]}).encode())
        post(one, "create_sampling_session", sampling_session_seq_id=number + 1)
        assert post(one, "asample", **asked) == sampled
        assert refusal_of_waiting(one, "asample", **asked, seq_id=1) == 404


def test_a_tenant_has_so_many_sessions() -> None:
    """The oldest without a model and a sampler leaves for the next, whose name is no other's, also after a snapshot.
    Where each has some, the next is refused. Would not catch a forgotten session whose client is only slow.
    """
    desk = opened("create_session", "create_model")
    for _ in range(MOST_SESSIONS - 1):
        post(desk, "create_session")
    again = a_desk()
    again.restore(json.loads(json.dumps(desk.kept())))
    for one in (desk, again):
        assert post(one, "create_session")["session_id"] == f"session-{MOST_SESSIONS}"
        names = one.sessions("anna")
        assert len(set(names)) == MOST_SESSIONS and "session-1" not in names and "session-0" in names
        for name in names[:-1]:
            post(one, "create_sampling_session", session_id=name, model_path=None, base_model="assets/demo/model")
        assert refusal_of(one, "create_session").status == 429
