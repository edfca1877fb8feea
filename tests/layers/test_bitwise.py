"""Float32, cut at multiples of the kernel chunk: the recurrent layer gives the same bits as without a cut."""

import pytest
import torch

from stateflow.layers import GatedDeltaNet, Mamba3

LAYERS = {
    "gdn": lambda: GatedDeltaNet(96, 2, 4, head_k_dim=32, head_v_dim=24),
    "mamba3": lambda: Mamba3(96, 4, head_dim=24, state_dim=32, num_angles=8),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cut", [[64, 256], [128, 128, 64], [64] * 5], ids=str)
def test_a_cut_recurrent_layer_gives_the_bits_of_the_uncut_one(kind, cut):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    x_BTD = torch.randn(2, 320, 96)
    weight_BTD = torch.randn_like(x_BTD)

    def run(lengths):
        x = x_BTD.clone().requires_grad_()
        first = state = tuple(t.requires_grad_() for t in layer.initial_state(2, "cpu", torch.float32))
        outputs = []
        for chunk in x.split(lengths, dim=1):
            y, state = layer(chunk, state)
            outputs.append(y)
        y = torch.cat(outputs, dim=1)
        grads = torch.autograd.grad((y * weight_BTD).sum(), (x, *first))
        return y, *state, *grads

    for whole, cut_up in zip(run([320]), run(cut), strict=True):
        assert torch.equal(whole, cut_up)
