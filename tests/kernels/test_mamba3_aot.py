"""What Mamba-3's kernels take on Hopper: tensor cores, room in shared memory. Needs a compiler, but no GPU."""

import pytest

from stateflow_kernels.aot import serialized
from tests.kernels.aot_testing import TRITONS, archs_of, compile_ahead, takes_gluon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SHARED_BYTES = 227 * 1024  # of a program on sm_90


@pytest.fixture(scope="module", params=TRITONS)
def reports(request) -> list[dict]:
    return compile_ahead(request.param, "mamba3_aot")


def test_every_kernel_compiles_for_every_architecture(reports):
    names = {(r["case"], r["arch"]) for r in reports}
    kernels = {"local", "scan", "out", "local_backward", "scan_backward", "shared", "gates", "theta"}
    kernels |= {"query_gradients", "key_gradients", "owed", "carry", "gates_backward", "shared_backward", "sums"}
    specialized = {name for name, _ in names if "specialised" in name}
    assert bool(specialized) == takes_gluon(reports)
    expected = {(kernel, arch) for kernel in kernels for arch in archs_of(reports)}
    assert names == expected | {(name, 90) for name in specialized}


def test_products_use_tensor_cores(reports):
    with_products = {"local", "out", "local_backward", "query_gradients", "key_gradients", "gates_backward"}
    on_hopper = [r for r in reports if r["arch"] == 90]
    assert {r["case"] for r in on_hopper if r["wgmma"] and "specialised" not in r["case"]} == with_products
    assert all(r["wgmma"] for r in on_hopper if "specialised" in r["case"])


def test_the_walks_and_what_is_short_do_not_spill(reports):
    heavy = ("local", "both", "out", "query_gradients", "key_gradients", "gradients")
    assert not [r for r in reports if r["spill_bytes"] and not r["case"].startswith(heavy)]


def test_the_gradients_in_one_spill_next_to_nothing(reports):
    """Local memory has next to no cache beside all that shared memory. Most is spilled ahead of the loops."""
    assert all(r["spill_bytes"] <= 96 for r in reports if r["case"].startswith("gradients, specialised"))


def test_all_fit_into_shared_memory(reports):
    assert not [r for r in reports if r["arch"] == 90 and r["shared_bytes"] > SHARED_BYTES]


def test_no_loop_overwrites_what_its_products_read(reports):
    assert not [r for r in reports if r["overwritten"]]


def test_no_tile_is_given_back_while_loads_of_it_are_under_way(reports):
    specialised = [r for r in reports if "specialised" in r["case"]]
    assert not [(r["case"], r["under_way"]) for r in specialised if r["under_way"]]


def test_products_of_specialised_kernels_do_not_wait_for_each_other(reports):
    assert not [r["case"] for r in reports if "specialised" in r["case"] and r["serialized"]]


def test_products_that_wait_for_each_other_are_found():
    product = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56, gsb0 ;\n"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    assert serialized(4 * (product + wait))
    assert not serialized(4 * product + wait)
    assert not serialized("FADD R1, R2, R3 ;\n")
