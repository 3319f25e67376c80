"""Rehearse ranks of a run on GPUs that do not exist: `megatron-rl rehearse`.

A rank's own code runs with device cuda on tensors without memory (torch's fake tensors), in a process of its own in
which a CPU build of torch pretends to have GPUs (`third_party_patches/torch`). What is learnt: peak memory of every
phase next to the plan, every collective, and every wait of the host. Collectives, sends and receives of the rehearsed
ranks are matched with each other.

rehearsal.py          the command's side: starts the process, reads what ranks wrote
rehearsal_request.py  which ranks, of which configuration
fewer_layers.py       a configuration whose models have few layers
child.py              the process: a fork for each rank
rehearsed_rank.py     a rank's phases, on the batches of synthetic_batches.py
rehearsed_rollout.py  entering rollout mode in the actor's pool; rehearsed_transfer.py: weights for another pool
rehearsed_save.py     a save, without its bytes; objects that ranks exchange
fake_peers.py         what happens where other ranks or files would answer
dispatch_mode.py      what happens to every operation; known_values.py, memory_tracker.py: what it keeps
recorded_works.py     works of collectives, and who waits for them; nccl_rules.py: tensors that NCCL refuses
stream_order.py       memory, streams, events and works: accesses that nothing orders; access_order.py: of one memory
group_calls.py        a recorded collective, or send or receive; matcher.py: whether those of all ranks fit together
known_places.py       host waits and groups next to an accepted list
comparison.py         planned and rehearsed peaks
"""
