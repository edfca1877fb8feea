"""The benchmark of attention, as far as there is no GPU: its block mask, its figures, its refusals."""

import argparse

import pytest
import torch

from stateflow.bench import attention
from stateflow.bench.measure import Timing

OPTIONS = argparse.Namespace(heads=20, head_dim=128)


@pytest.mark.parametrize(("prefix", "tokens"), [(0, 256), (256, 384)])
def test_the_block_mask_is_causal_behind_the_prefix(prefix, tokens):
    mask = attention.block_mask(prefix, tokens, "cpu")
    from torch.nn.attention.flex_attention import create_block_mask

    expected = create_block_mask(
        lambda b, h, q, kv: kv <= q + prefix, None, None, tokens, prefix + tokens, device="cpu"
    )
    assert mask.shape == expected.shape
    assert torch.equal(mask.to_dense(), expected.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(mask.kv_num_blocks, expected.kv_num_blocks)


def test_figures_of_a_row():
    times = {"forward": Timing.of([2.0]), "backward": Timing.of([10.0])}
    row = {"prefix": 1024, "tokens": 2048, "name": "cudnn", **times, "errors": {"o": 1e-3, "dq": 2e-3}}
    flops = 4 * 20 * 128 * (1024 * 2048 + 2048 * 2048 / 2)
    assert attention.rates(row, OPTIONS) == pytest.approx((flops / 2e9, 2.5 * flops / 1e10))
    assert attention.cells(row, OPTIONS)[0] == "2.000 / 10.000" and attention.cells(row, OPTIONS)[3] == "2.0e-03"
    refused = {"prefix": 0, "tokens": 128, "name": "flash", "why_not": "no kernel"}
    assert attention.table([row, refused], OPTIONS).splitlines()[-1] == "| 0 | 128 | flash | - | - | - | no kernel |"


def test_refusals(capsys):
    calls = ((["--heads", "6"], "a multiple of --kv-heads 5"), (["--shapes", "1,128"], "multiples of 128"))
    for call, message in calls:
        with pytest.raises(SystemExit):
            attention.main(call)
        assert message in capsys.readouterr().err
