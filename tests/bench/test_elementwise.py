import pytest

from stateflow.bench import elementwise
from stateflow_kernels.primitives import INTERPRETED
from stateflow_kernels.waves import units_of_a_program

SMALL = ["--device", "cpu", "--tokens", "9", "--parity-tokens", "9", "--dim", "8", "--heads", "2", "--head-dim", "8"]
TILES = ["swiglu=64,1", "gated_norm=32,1", "gated_norm_backward=32,1,2,4"]

interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def run(*more: str) -> int:
    return elementwise.main([*SMALL, "--ffn-dim", "12", "--seconds", "1000", "--tiles", *TILES, *more])


@interpreted
def test_each_tile_has_a_row(capsys):
    assert run("--only", "copy", "swiglu", "gated_norm", "gated_norm_backward") == 0
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    names = [name.strip() for name, *_ in rows]
    assert names == ["copy", "gated_norm", "gated_norm", *2 * ["gated_norm_backward"], "swiglu", "swiglu"]
    assert [built_in.strip() for _, built_in, _ in rows].count("built in") == 4


@interpreted
def test_a_wrong_kernel_is_not_timed(capsys, monkeypatch):
    right = elementwise.swiglu
    monkeypatch.setattr(elementwise, "swiglu", lambda gate, x: 1.02 * right(gate, x))
    assert run("--only", "swiglu") == 1
    assert "wrong: 4 of what is allowed" in capsys.readouterr().out


def test_tiles_need_a_name(capsys):
    with pytest.raises(SystemExit):
        elementwise.parse(["--tiles", "softmax=1,2"])
    assert "give NAME=a,b,.. with one of copy, rms_norm, short_conv" in capsys.readouterr().err


@pytest.mark.parametrize("units", [1, 7, 128, 4096, 16384])
@pytest.mark.parametrize("programs_of_a_unit", [1, 10, 2000])
def test_programs_come_in_whole_waves(units, programs_of_a_unit, at_once=1056, most=40):
    share = units_of_a_program(units, programs_of_a_unit, at_once, most)
    assert 1 <= share <= most
    programs = -(-units // share) * programs_of_a_unit
    fewest = units * programs_of_a_unit / most
    if at_once >= programs_of_a_unit:
        assert programs <= -(-fewest // at_once) * at_once
