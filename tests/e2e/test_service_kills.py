"""A service that is killed at any moment, and one that has served for long."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from random import Random
from threading import Timer

import psutil
import pytest
from command_line import CommandLine
from service_client import BASE, CUTS, DP2, KEYS, ROW, TrainingService, a_pass, create, sample
from sweeps import often

from megatron_rl.serve.request_journal import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class PatientClient:
    """Sends its requests again after each kill -9 of the service, which then starts again."""

    def __init__(self, folder: Path, seed: int, *overrides: str) -> None:
        self.folder, self.overrides, self.draw = folder, overrides, Random(seed)
        self.service, self.num_kills = TrainingService(folder, *overrides), 0
        self.timer = Timer(0, lambda: None)
        self.timer.start()

    def kill_after(self, seconds: float) -> None:
        self.timer = Timer(seconds, self.service.line.kill_all)
        self.timer.start()

    def done(self, request: tuple[str, dict | bytes], most_kills: int, tenant: str) -> bytes:
        while True:
            if self.num_kills < most_kills and self.timer.finished.is_set():
                self.kill_after(self.draw.uniform(0.01, 0.4))
            try:
                return self.service.done(*request, tenant)[1]
            except (OSError, HTTPException):  # no connection, or one that ends
                self.timer.join()
                self.num_kills += 1
                self.service.line.kill_all()
                self.service = TrainingService(self.folder, *self.overrides)

    def end(self) -> None:
        self.timer.cancel()
        self.timer.join()


KILLS = {
    "3 kills, pruned": (3, 5, 0.001, 4),
    "3 kills, pruned, DP2": (3, 5, 0.001, 0),
    "30 kills, pruned": (30, 40, 0.02, 4),
    "30 kills": (30, 40, 0.0, 4),
}
"""Kills, rounds of requests, the journal's size in MiB, and the rank of adapters."""


def a_round(model: str, number: int) -> list[tuple[str, dict | bytes]]:
    """A pass, a step, and a state that is saved in place of the last and loaded."""
    first, path = 4 * number + 1, f"tinker://{model}/weights/end"
    state = {"model_id": model, "path": path, "optimizer": True}
    return [
        ("forward_backward", a_pass(model, first, row=ROW[(number + int(model[8])) % 3 :])),
        ("optim_step", {"model_id": model, "seq_id": first + 1, "adam_params": {"learning_rate": 0.01}}),
        ("save_weights", {"model_id": model, "seq_id": first + 2, "path": "end", "overwrite": True}),
        ("load_weights", state | {"seq_id": first + 3}),
    ]


@pytest.mark.parametrize("case", often(KILLS, (), [*KILLS][1:]))
@pytest.mark.timeout(1500)
def test_kills_at_drawn_moments_change_nothing(case: str, tmp_path: Path) -> None:
    """Two tenants' replies and states are bit for bit those of a service that nobody kills, whether the journal has all
    or begins with a snapshot. A repetition from there finds every reply again.

    Would not catch a disk that loses what it has synchronised.
    """
    most_kills, rounds, size, rank = KILLS[case]
    overrides, found = (*(CUTS["one"] if rank else DP2), "--journal-mb"), []
    for kills, journal_mb in ((0, 0.0), (most_kills, size)):
        (tmp_path / str(kills)).mkdir()
        client = PatientClient(tmp_path / str(kills), 1, *overrides, str(journal_mb))
        try:
            models = {tenant: create(client.service, tenant, rank) for tenant in KEYS}
            requests = [(one, who) for n in range(rounds) for who, model in models.items() for one in a_round(model, n)]
            replies = [client.done(request, kills, tenant) for request, tenant in requests]
            client.end()
            last = [f"tinker://{model}/weights/end~{rounds - 1}" for model in models.values()]
            found.append((replies, [client.service.saved(copy) for copy in last]))
            assert client.num_kills == kills and found[0][1][0] != found[0][1][1] != []
        finally:
            client.end()
            client.service.line.kill_all()
    assert found[0] == found[1]
    run = client.service.line.run
    assert (next(records(run / "journal"))[0]["kind"] == "snapshot") == bool(size)
    (tmp_path / "again").mkdir()
    again = CommandLine(tmp_path / "again", "--replay", str(run / "journal"), *overrides[:-1], stage="serve")
    assert again.wait(timeout=300) == 0, again.text()


def sizes(service: TrainingService) -> dict[str, int]:
    """Memory in MiB, open files and sockets of all processes; bytes of what is on the disk."""
    parent = psutil.Process(service.line.process.pid)
    alive = [parent, *parent.children(recursive=True)]
    files = [file for file in service.line.run.rglob("*") if file.is_file()]
    return {
        "memory": sum(one.memory_info().rss for one in alive) >> 20,
        "files": sum(one.num_fds() for one in alive),
        "sockets": sum(len(one.net_connections()) for one in alive),
        "disk": sum(file.stat().st_size for file in files) >> 20,
    }


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(1500)
def test_two_thousand_commands_leave_nothing_behind(tmp_path: Path) -> None:
    """Memory, open files, sockets and the disk are after 2,000 commands as after 800. Would not catch slow growth below
    20 MiB in 1,200 commands.
    """
    service = TrainingService(tmp_path, *CUTS["one"], "--journal-mb", "0.05")
    try:
        model, found = create(service, "anna", 4), []
        for number in range(400):
            if number in (160, 399):
                found.append(sizes(service))
            for name, body in a_round(model, number):
                service.done(name, body)
            base = {"session_id": "session-0", "sampling_session_seq_id": number, "base_model": BASE}
            assert service.ask("create_sampling_session", base)[0] == 200
            service.done("asample", sample(f"session-0:sample:{number}", number))
        print(found)
        assert found[1]["memory"] - found[0]["memory"] < 20
        assert all(found[1][name] <= found[0][name] + 2 for name in ("files", "sockets", "disk"))
    finally:
        service.line.kill_all()
