import json
import math
from copy import deepcopy
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stateflow.loss import cross_entropy_sum, reference_cross_entropy
from stateflow.model import LanguageModel, ModelConfig, count_parameters, flops_per_token, logits
from stateflow.pipeline.split import split_model
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

CONFIG = ModelConfig(
    dim=12,
    num_layers=3,
    pattern=["gdn", "attention"],
    vocab_size=17,
    num_heads=1,
    num_v_heads=2,
    head_k_dim=4,
    head_v_dim=3,
    num_attention_heads=2,
    num_kv_heads=1,
    attention_head_dim=4,
    num_mamba_heads=2,
    mamba_head_dim=5,
    mamba_state_dim=6,
    mamba_num_angles=2,
    ffn_dim=10,
    init_std=0.3,
    init_seed=5,
)


def make_model(dtype: torch.dtype = torch.float64, **changes) -> LanguageModel:
    model = LanguageModel(replace(CONFIG, **changes))
    model.init_weights()
    return model.to(dtype)


def make_batch(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    tokens = torch.randint(17, (2, num_tokens + 1))
    labels = tokens[:, 1:].masked_fill(torch.rand(2, num_tokens) < 0.2, -100)
    return tokens[:, :-1], labels


def loss_in_chunks(model: LanguageModel, tokens, labels, docs: Tensor | None, bounds: list[int]) -> Tensor:
    state = model.initial_state(2, "cpu", torch.float64)
    losses = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        output, updates = model(tokens[:, start:stop], piece_docs, state)
        losses.append(cross_entropy_sum(output, labels[:, start:stop]))
        blocks = model.layers.values()
        state = tuple(b.mixer.advance(s, u) for b, s, u in zip(blocks, state, updates, strict=True))
    return sum(losses)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20),
    num_tokens=st.integers(1, 20),
    cuts=st.sets(st.integers(1, 19), min_size=1, max_size=3),
    with_docs=st.booleans(),
)
def test_chunks_and_fast_forms_equal_the_reference_model_on_the_whole(seed, num_tokens, cuts, with_docs):
    tokens, labels = make_batch(num_tokens, seed)
    docs = documents(2, num_tokens).clamp(min=0) if with_docs else None
    reference, model = make_model(backend="reference"), make_model()
    expected = gradients(reference_cross_entropy(reference(tokens, docs), labels), reference)
    assert_close(gradients(cross_entropy_sum(model(tokens, docs), labels), model), expected)
    bounds = [0, *sorted(c for c in cuts if c < num_tokens), num_tokens]
    assert_close(gradients(loss_in_chunks(model, tokens, labels, docs, bounds), model), expected)


def test_documents_reach_every_layer():
    tokens, _ = make_batch(9)
    docs = torch.tensor([[0] * 4 + [4] * 5] * 2)
    others = torch.cat([(tokens[:, :4] + 1) % 17, tokens[:, 4:]], dim=1)
    for pattern in (["gdn"], ["mamba3"], ["attention"], ["gdn", "attention"]):
        model = make_model(pattern=pattern)
        separate, mixed = ([logits(model(x, d)) for x in (tokens, others)] for d in (docs, None))
        assert torch.equal(separate[0][:, 4:], separate[1][:, 4:])
        assert (separate[0][:, :4] != separate[1][:, :4]).any()
        assert (mixed[0][:, 4:] != mixed[1][:, 4:]).any()


def split_in_two(model: LanguageModel) -> tuple[LanguageModel, LanguageModel]:
    first, second = deepcopy(model), deepcopy(model)
    first.norm = first.output = second.tok_embeddings = None
    del first.layers["1"], first.layers["2"], second.layers["0"]
    return first, second


def test_parts_compose_to_the_whole():
    tokens, labels = make_batch(9)
    docs, model = documents(2, 9).clamp(min=0), make_model()
    first, second = split_in_two(model)
    hidden = first(tokens, docs)
    assert hidden.shape == (2, 9, 12)
    output, updates = second(hidden, docs, second.initial_state(2, "cpu", torch.float64))
    assert [len(u) for u in updates] == [2, 4]  # attention, gdn
    assert list(second.state_spec(torch.float64)) == ["layers.1", "layers.2"]
    whole = model(tokens, docs)
    assert_same_bits([logits(output)], [logits(whole)])
    assert logits(whole).shape == (2, 9, 17)
    with pytest.raises(ValueError, match="state has 1 entries but this part of the model has 2 layers"):
        second(hidden, docs, updates[:1])


def test_the_head_gives_an_alias_of_its_weight_and_no_logits():
    model = make_model()
    hidden, weight = model(make_batch(3)[0])
    assert hidden.shape == (2, 3, 12)
    assert weight is not model.output.weight and weight.data_ptr() == model.output.weight.data_ptr()
    assert [name for name, _ in model.named_children()] == ["tok_embeddings", "layers", "norm", "output"]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p.detach().clone()
        for name, p in model.named_parameters()
    }


def test_initialisation_fills_everything_and_follows_the_seed():
    model = LanguageModel(CONFIG)
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.init_weights()
    first = weights(model)
    assert all(p.isfinite().all() for p in first.values())
    torch.manual_seed(99)
    torch.randn(7)
    model.init_weights()
    assert_same_bits(list(weights(model).values()), list(first.values()))

    model.config = replace(CONFIG, init_seed=6)
    model.init_weights()
    random = [name for name, p in first.items() if "norm" not in name]
    assert all(not torch.equal(weights(model)[name], first[name]) for name in random)

    model.config = replace(CONFIG, init_seed=None)
    by_default = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        torch.randn(seed)
        model.init_weights()
        by_default.append(weights(model)["layers.0.mixer.q_proj.weight"])
    assert torch.equal(by_default[0], by_default[1]) and not torch.equal(by_default[0], by_default[2])
    assert not torch.equal(first["layers.0.mixer.q_proj.weight"], first["layers.2.mixer.q_proj.weight"])


def test_initialisation_does_not_depend_on_splitting_or_wrapping():
    whole = weights(make_model(torch.float32))
    for part in split_in_two(LanguageModel(CONFIG)):
        part.init_weights()
        assert all(torch.equal(p, whole[name]) for name, p in weights(part).items())
    model = LanguageModel(CONFIG)
    model.layers["0"] = checkpoint_wrapper(model.layers["0"])
    model.layers["1"] = torch.compile(checkpoint_wrapper(model.layers["1"]), backend="eager")
    model.layers["2"] = torch.compile(model.layers["2"], backend="eager")
    model.init_weights()
    assert weights(model).keys() == whole.keys()
    assert_same_bits([weights(model)[name] for name in whole], list(whole.values()))


def test_initialisation_does_not_depend_on_sharding():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = weights(make_model(torch.float32))
    # Three ranks, of which this process is the last: nothing may be sent. (DTensor caches by mesh, so that a
    # process can play one rank only.)
    rank = 2
    torch.distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (3,))
        with torch.device("meta"):
            model = LanguageModel(CONFIG)
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            shards = whole[name].chunk(3)
            expected = shards[rank] if rank < len(shards) else whole[name][:0]
            assert torch.equal(parameter.to_local(), expected), name
    finally:
        torch.distributed.destroy_process_group()


def test_initial_distributions():
    model = make_model(torch.float32, dim=128, ffn_dim=256, num_heads=32, num_v_heads=64, vocab_size=512)
    w = weights(model)
    for name, std in (
        ("tok_embeddings.weight", 0.3),
        ("output.weight", 0.3),
        ("layers.0.mixer.q_proj.weight", 0.3),
        ("layers.0.mixer.o_proj.weight", 0.3 / math.sqrt(6)),
        ("layers.1.mixer.wo.weight", 0.3 / math.sqrt(6)),
        ("layers.0.feed_forward.w1.weight", 0.3),
        ("layers.0.feed_forward.w2.weight", 0.3 / math.sqrt(6)),
    ):
        assert w[name].std().item() == pytest.approx(std, rel=0.1), name
    decay = w["layers.0.mixer.decay.A_log"].exp()
    assert 1 <= decay.min() < 4 and 12 < decay.max() <= 16
    step = nn.functional.softplus(w["layers.0.mixer.decay.dt_bias"])
    assert 0.9e-3 < step.min() < 3e-3 and 3e-2 < step.max() < 1.01e-1
    assert 0.45 < w["layers.0.mixer.q_conv1d.weight"].abs().max() <= 0.5  # 1 / sqrt(4)
    assert (w["layers.0.mixer_norm.weight"] == 1).all()


def test_config_survives_json():
    restored = ModelConfig(**json.loads(json.dumps(asdict(replace(CONFIG, pattern=("gdn", "attention"))))))
    restored.validate()
    assert restored == CONFIG
    assert restored.layer_kinds() == ["gdn", "attention", "gdn"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dim=0), "dim = 0: must be an integer of at least 1"),
        (dict(num_layers=2.0), "num_layers = 2.0: must be an integer"),
        (dict(norm_eps=0.0), "norm_eps = 0.0: must be a number above 0"),
        (dict(pattern=[]), r"pattern = \[\]: must be a list"),
        (dict(pattern="gdn"), "pattern = 'gdn': must be a list"),
        (dict(pattern=["gdn", "atention"]), "pattern = 'atention': unknown; use 'attention'"),
        (dict(backend="chunks"), "backend = 'chunks': unknown; use 'chunk'"),
        (dict(num_heads=4, num_v_heads=6), "num_v_heads = 6: must be a multiple of num_heads = 4; use 8"),
        (dict(num_v_heads=0), "num_v_heads = 0: must be an integer of at least 1"),
        (dict(num_attention_heads=8, num_kv_heads=5), "num_kv_heads = 5: must divide .* = 8; use 4"),
        (dict(attention_head_dim=7), "attention_head_dim = 7: must be even .*; use 8"),
        (dict(mamba_num_angles=4), "mamba_num_angles = 4: .* at most half of them; use 1"),
        (dict(num_mamba_heads=0), "num_mamba_heads = 0: must be an integer of at least 1"),
    ],
)
def test_config_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes).validate()
    with pytest.raises(ValueError, match=message):
        LanguageModel(replace(CONFIG, **changes))


def test_counts_match_a_hand_count():
    d, ffn, vocab = 12, 10, 17
    gdn = d * (4 + 4 + 6 + 2 + 2 + 6 + 6) + 4 * (4 + 4 + 6)
    attention = d * (8 + 4 + 4 + 8)
    matrices = 2 * gdn + attention + 3 * (3 * d * ffn) + vocab * d
    vectors = 2 * (2 + 2 + 3) + 3 * 2 * d + d
    assert count_parameters(CONFIG) == matrices + vectors + vocab * d
    assert count_parameters(CONFIG) == sum(p.numel() for p in make_model().parameters())
    recurrence = 2 * 18 * 2 * 4 * 3
    assert flops_per_token(CONFIG, 100) == 6 * matrices + 6 * 2 * 4 * 100 + recurrence
    assert flops_per_token(replace(CONFIG, num_v_heads=None, num_heads=2), 8) > 0


def test_counts_of_mamba3_match_a_hand_count():
    d, ffn, vocab, layers = 12, 10, 17, 2
    config = replace(CONFIG, pattern=["mamba3"], num_layers=layers)
    mamba3 = d * (10 + 10 + 6 + 6 + 2 + 2 + 2 + 2) + 10 * d
    matrices = layers * (mamba3 + 3 * d * ffn) + vocab * d
    others = layers * (2 + 2 + 2 * 6 + 2 * 2 * 6) + layers * 2 * d + d
    assert count_parameters(config) == matrices + others + vocab * d
    assert flops_per_token(config, 100) == 6 * matrices + layers * 12 * 2 * 6 * 5


def test_initial_distributions_of_mamba3():
    config = replace(CONFIG, pattern=["mamba3"], dim=64, num_mamba_heads=256, init_seed=1)
    model = LanguageModel(config)
    model.init_weights()
    w = {name.removeprefix("layers.0.mixer."): p for name, p in model.named_parameters()}
    step = nn.functional.softplus(w["dynamics.dt_bias"])
    assert 0.9e-3 < step.min() < 2e-3 and 5e-2 < step.max() < 1.01e-1
    assert all((w[f"dynamics.{name}"] == 1).all() for name in ("B_norm", "C_norm", "B_bias", "C_bias", "D"))
    assert w["x_proj.weight"].std().item() == pytest.approx(0.3, rel=0.1)
    assert w["out_proj.weight"].std().item() == pytest.approx(0.3 / math.sqrt(6), rel=0.1)


def test_earlier_parts_take_what_does_not_come_out_even():
    config = ModelConfig(dim=8, num_layers=5, pattern=["gdn"], num_heads=1, head_k_dim=4, head_v_dim=4, ffn_dim=8)
    parts = split_model(LanguageModel(config), 3)
    assert [list(part.layers) for part in parts] == [["0", "1"], ["2", "3"], ["4"]]
    assert [[part.tok_embeddings is None, part.norm is None, part.output is None] for part in parts] == [
        [False, True, True], [True, True, True], [True, False, False]
    ]  # fmt: skip
    with pytest.raises(ValueError, match="num_stages = 6 does not fit 5 layers; use 1 to 5"):
        split_model(LanguageModel(config), 6)


def test_every_option_reaches_its_layer():
    config = ModelConfig(
        dim=8, num_layers=3, pattern=["gdn", "mamba3", "attention"], num_heads=1, num_v_heads=2, head_k_dim=4,
        head_v_dim=6, conv_size=3, allow_neg_eigval=True, num_mamba_heads=2, mamba_head_dim=4, mamba_state_dim=8,
        mamba_num_angles=3, num_attention_heads=2, num_kv_heads=1, attention_head_dim=10, rope_theta=7.0,
        rope_reset=True, ffn_dim=16, norm_eps=1e-3, backend="chunk", overlap_projections="off", exact_order=False,
    )  # fmt: skip
    model = LanguageModel(config)
    blocks = list(model.layers.values())
    gdn, mamba3, attention = (block.mixer for block in blocks)
    assert (gdn.num_heads, gdn.num_v_heads, gdn.head_k_dim, gdn.head_v_dim, gdn.conv_size) == (1, 2, 4, 6, 3)
    assert gdn.allow_neg_eigval and not gdn.exact_order and gdn.o_norm.eps == 1e-3
    assert (mamba3.num_heads, mamba3.head_dim, mamba3.state_dim, mamba3.num_angles) == (2, 4, 8, 3)
    assert mamba3.overlap_projections == "off" and mamba3.norm_eps == 1e-5  # the official module's
    assert (attention.num_heads, len(attention.groups.sizes), attention.head_dim) == (2, 1, 10)
    assert attention.rope_theta == 7.0 and attention.rope_reset
    assert {mixer.backend for mixer in (gdn, mamba3, attention)} == {"chunk"}
    norms = [model.norm, *(norm for block in blocks for norm in (block.mixer_norm, block.ffn_norm))]
    assert {norm.eps for norm in norms} == {1e-3}
    assert all(block.feed_forward.w1.weight.shape == (16, 8) for block in blocks)
