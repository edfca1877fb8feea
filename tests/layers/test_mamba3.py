"""The weight map between our Mamba-3 layer and the official module, in both directions."""

import pytest
import torch
from torch import Tensor

from stateflow.layers import Mamba3
from stateflow.recurrence.mamba3 import Inputs
from tests.recurrence.op_testing import assert_close, assert_same_bits
from tests.recurrence.test_mamba3 import official_steps

DIM, HEADS, HEAD_DIM, STATE, ANGLES = 10, 5, 4, 8, 2  # expand 2, rotary fraction 0.5

# Of mamba_ssm.modules.mamba3.Mamba3(d_model=10, d_state=8, headdim=4).
OFFICIAL_SHAPES = {
    "in_proj.weight": (2 * 20 + 2 * 8 + 3 * 5 + 2, 10),
    "dt_bias": (5,),
    "B_bias": (5, 1, 8),
    "C_bias": (5, 1, 8),
    "B_norm.weight": (8,),
    "C_norm.weight": (8,),
    "D": (5,),
    "out_proj.weight": (10, 20),
}


def make_layer() -> Mamba3:
    return Mamba3(DIM, HEADS, head_dim=HEAD_DIM, state_dim=STATE, num_angles=ANGLES, backend="chunk").double()


def random_official() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in OFFICIAL_SHAPES.items()}


def test_the_map_is_one_to_one():
    official, layer = random_official(), make_layer()
    ours = Mamba3.from_official(official)
    assert ours.keys() == layer.state_dict().keys()
    layer.load_state_dict(ours)
    back = Mamba3.to_official(layer.state_dict())
    assert back.keys() == official.keys()
    assert_same_bits([back[name] for name in official], list(official.values()))
    again = Mamba3.from_official(back)
    assert_same_bits([again[name] for name in ours], list(ours.values()))


def test_the_layer_with_official_weights_computes_what_the_official_module_does():
    official, layer = random_official(), make_layer()
    layer.load_state_dict(Mamba3.from_official(official))
    x_BTD = torch.randn(2, 7, DIM, dtype=torch.float64)
    inner = HEADS * HEAD_DIM
    z, x, B, C, dd_dt, dd_A, trap, angle = torch.split(
        x_BTD @ official["in_proj.weight"].T, [inner, inner, STATE, STATE, HEADS, HEADS, HEADS, ANGLES], dim=-1
    )
    theta, state, k_last, v_last = layer.initial_state(2, "cpu", torch.float64)
    y_BTHP, *_ = official_steps(
        Inputs(
            x.unflatten(-1, (HEADS, HEAD_DIM)), z.unflatten(-1, (HEADS, HEAD_DIM)), B, C, dd_dt, dd_A, trap, angle,
            official["dt_bias"], official["B_norm.weight"], official["C_norm.weight"],
            official["B_bias"].squeeze(1), official["C_bias"].squeeze(1), official["D"], theta, state, k_last, v_last,
        )
    )  # fmt: skip
    assert_close([layer(x_BTD)[0]], [y_BTHP.flatten(2) @ official["out_proj.weight"].T], tolerance=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(norm=torch.zeros(20)), r"missing \[\], unknown \['norm'\]"),
        (dict(D=None), r"missing \['D'\], unknown \[\]"),
        (dict(B_bias=torch.zeros(5, 4, 8)), r"B_bias \[5, 4, 8\] must be \[5, 1, 8\]: MIMO is not supported"),
        ({"in_proj.weight": torch.zeros(89, 10)}, "in_proj.weight has 89 rows: with 5 heads of 4 and a state of 8"),
    ],
)
def test_weights_of_another_module_are_refused(change, message):
    weights = {name: x for name, x in (random_official() | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        Mamba3.from_official(weights)
