"""Which ptxas is called. What a look at its code finds is tested beside the kernels that are compiled."""

from pathlib import Path

import pytest
import torch

from stateflow_kernels import assembler

TRITONS, NEWER = assembler.bundled(), assembler.bundled("ptxas-blackwell")
INDUCTORS = Path(torch.__file__).parent / "bin" / "ptxas"


def chosen(monkeypatch, named, versions: dict) -> str | None:
    if named is None:
        monkeypatch.delenv(assembler.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(assembler.VARIABLE, str(named))
    monkeypatch.setattr(assembler, "version_of", versions.get)
    assembler.choose()
    return assembler.os.environ.get(assembler.VARIABLE)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(assembler.VARIABLE, "")  # so that what `choose` sets is taken back


# Inductor names torch's own when it first compiles, which may be before or after these kernels are imported.
@pytest.mark.parametrize("named", [None, INDUCTORS])
def test_without_a_word_of_the_user_the_same_one_whatever_was_compiled_before(monkeypatch, named):
    versions = {TRITONS: "12.8.93", NEWER: "12.9.86", INDUCTORS: "13.0.88"}
    assert chosen(monkeypatch, named, versions) == str(NEWER)
    assert chosen(monkeypatch, named, versions | {TRITONS: "13.0.1"}) == str(TRITONS)
    assert chosen(monkeypatch, named, {TRITONS: "12.8.93", INDUCTORS: "12.8.93"}) == str(TRITONS)


def test_the_users_choice_stays(monkeypatch):
    versions = {TRITONS: "12.8.93", NEWER: "12.9.86"}
    assert chosen(monkeypatch, "/usr/bin/ptxas", versions) == "/usr/bin/ptxas"


def test_where_triton_has_none(monkeypatch):
    assert chosen(monkeypatch, None, {}) is None
    assert chosen(monkeypatch, INDUCTORS, {}) == str(INDUCTORS)
