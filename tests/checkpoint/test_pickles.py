"""Pickles that would run code are refused, whichever way they are written, and none of them is run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.pickles import forbidden_globals, pickles_in

SYSTEM = f"{os.system.__module__}.system"


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def plain(folder: Path, content: bytes) -> Path:
    file = folder / ".metadata"
    file.write_bytes(content)
    return file


def archive(folder: Path, value: object, **kwargs) -> Path:
    file = folder / "common.pt"
    torch.save(value, file, **kwargs)
    return file


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("nested", [False, True], ids=["bare", "nested"])
def test_a_command_is_found_in_every_protocol(tmp_path, protocol, nested):
    """The sample really is malicious: loading it leaves a mark. Would not catch a protocol 6."""
    mark = tmp_path / "mark"
    value = {"a": [OrderedDict(b=(1, Malicious(mark)))]} if nested else Malicious(mark)
    content = pickle.dumps(value, protocol)
    assert forbidden_globals(plain(tmp_path, content)) == {SYSTEM}
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_command_is_found_in_an_archive(tmp_path, protocol):
    """torch's default protocol and one with STACK_GLOBAL. Would not catch code hidden in a tensor's bytes."""
    mark = tmp_path / "mark"
    file = archive(tmp_path, {"step": 3, "x": [Malicious(mark), torch.ones(2)]}, pickle_protocol=protocol)
    assert SYSTEM in forbidden_globals(file)
    assert not mark.exists()


DYNAMIC = "<a name put together while loading>"
MODULE, NAME = b"\x8c\x05posix", b"\x8c\x06system"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x80\x04" + MODULE + NAME + b"\x93.", SYSTEM),
        (b"\x80\x04" + MODULE + b"\x94" + NAME + b"\x94\x93.", SYSTEM),
        (b"\x80\x04" + NAME + b"\x94" + MODULE + b"\x94" + b"0h\x010h\x01h\x00\x93.", SYSTEM),
        (b"\x80\x04" + NAME + b"q\x07" + MODULE + b"r\x00\x01\x00\x00" + b"00j\x00\x01\x00\x00h\x07\x93.", SYSTEM),
        (b"\x80\x04" + NAME + b"p9\n0" + MODULE + b"g9\n\x93.", SYSTEM),
        # 5 is written first, so MEMOIZE writes 1 (not 0, not 6).
        (
            b"\x80\x04\x8c\x05torchq\x05\x8c\x04Size\x94" + MODULE + b"q\x06" + NAME + b"q\x010" + b"h\x06h\x01\x93.",
            SYSTEM,
        ),
        (b"\x80\x04" + MODULE + b"\x8c\x01a0" + NAME + b"\x93.", DYNAMIC),
        (b"\x80\x04" + MODULE + b"2" + NAME + b"\x93.", DYNAMIC),
        (b"\x80\x04" + NAME + b"2\x93.", DYNAMIC),
        (b"\x80\x04(" + MODULE + NAME + b"t\x93.", DYNAMIC),
        (b"\x80\x04h\x05h\x06\x93.", DYNAMIC),
        (b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.", "torch.Size.__class__"),
        (b"\x80\x04\x8c\x0atorch Size\x8c\x00\x93.", "torch.Size."),
        (b"(S'true'\niposix\nsystem\n.", SYSTEM),
        (b"cposix\nsystem\n.", SYSTEM),
        (b"\x80\x02\x82\x01.", "<extension 1>"),
        (b"\x80\x02\x83\x01\x01.", "<extension 257>"),
        (b"\x80\x02\x84\x01\x00\x01\x00.", "<extension 65537>"),
    ],
)
def test_names_by_every_road(tmp_path, content, expected):
    """Written by hand: memo, duplicates, INST, registered extensions. Would not catch an opcode Python adds later."""
    assert forbidden_globals(plain(tmp_path, content)) == {expected}


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"\x80\x04N", b"\xff.", b"\x8c\xffab.", b"PK\x03\x04", b"c\xff\n\n."]
)
def test_what_is_not_a_pickle_is_refused(tmp_path, content):
    """Empty, cut, unknown opcodes. Would not catch a pickle that goes wrong only when it is loaded."""
    (name,) = forbidden_globals(plain(tmp_path, content))
    assert name.startswith("<not a file of this kind")


def test_values_are_harmless(tmp_path):
    """Numbers, containers, tensors. Would not catch what a checkpoint will hold one day."""
    values = {
        "a": 1,
        "b": [2.5, None, (True, "x")],
        "c": {"d": b"bytes"},
        "e": {3},
        "f": torch.ones(2),
        "g": torch.int64,
    }
    assert forbidden_globals(archive(tmp_path, values)) == set()
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.bool]
    assert forbidden_globals(archive(tmp_path, [torch.zeros(3).to(dtype) for dtype in dtypes])) == set()
    assert forbidden_globals(plain(tmp_path, pickle.dumps({"a": torch.Size([1, 2]), "p": Path("/x")}))) == set()


def rezip(file: Path, changes: dict[str, str], extra: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The same archive, members renamed and added, ended in the plain way."""
    members = {}
    with zipfile.ZipFile(file) as source:
        for name in source.namelist():
            members[changes.get(name, name)] = source.read(name)
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, content in (members | extra).items():
            target.writestr(name, content)


def test_archives_of_another_make_are_refused(tmp_path):
    """Whatever another reader could read in another way. Would not catch a flaw in torch's own reader."""
    file = archive(tmp_path, {"a": 1})
    good = file.read_bytes()
    assert forbidden_globals(file) == set()
    torch.save({"a": 1}, legacy := io.BytesIO(), _use_new_zipfile_serialization=False)
    evil = archive(tmp_path, Malicious(tmp_path / "mark")).read_bytes()
    for content in (
        legacy.getvalue(),
        b"",
        good[:-1],
        good + b"x",
        b"PK\x03\x04" + good,
        evil + good,
        good[:-2] + b"\x01\x00x",
    ):
        file.write_bytes(content)
        (name,) = forbidden_globals(file)
        assert "not an archive of torch.save" in name
    for changes, extra in (
        ({}, {"common/DATA.PKL": b"."}),
        ({}, {"common/constants.pkl": b"."}),
        ({"common/data.pkl": "common/other.pkl"}, {}),
    ):
        file.write_bytes(good)
        rezip(file, changes, extra)
        assert forbidden_globals(file)
    assert not (tmp_path / "mark").exists()


def test_the_pickles_of_a_checkpoint(tmp_path):
    """In every role's folder. Would not catch a pickle under a name that nothing loads."""
    for name in (
        "actor/.metadata",
        "actor/common.pt",
        "critic/.metadata",
        "run.json",
        "actor/__0_0.distcp",
        "x/rng_0.pt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [file.relative_to(tmp_path).as_posix() for file in pickles_in(tmp_path)]
    assert found == ["actor/.metadata", "actor/common.pt", "critic/.metadata", "x/rng_0.pt"]
