"""Sharing out work that could be any number of programs: the last wave of two and a bit takes as long as the others."""

import functools

import torch
import triton


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Of the gated delta rule's walks in segments, see `transition`; by measurement on an H200, with its multiprocessors.
_PROGRAMS, _BLOCK_V = 132, 64
_FEWEST_SEGMENTS = 5  # a segment is walked through twice, and by twice as many columns the first time
_MOST_K = 128  # a larger map would fill a multiprocessor
_LEAST_CHUNKS = 32  # of a segment; shorter ones were not measured


def walk_segments(num_chunks: int, heads: int, k_dim: int, v_dim: int) -> int:
    """In how many segments the chunks of so many heads are walked through at once; 1 where one walk is faster.

    Of the shape alone: the backward must find as many as the forward, on whatever device and with whatever plan.
    """
    if k_dim > _MOST_K or heads == 0:  # an empty batch
        return 1
    segments = min(_PROGRAMS // (heads * triton.cdiv(v_dim, _BLOCK_V)), num_chunks // _LEAST_CHUNKS)
    return segments if segments >= _FEWEST_SEGMENTS else 1


def why_one_walk(num_chunks: int, heads: int, k_dim: int, v_dim: int) -> str | None:
    """Why there is one segment, for people; None if there are several."""
    if walk_segments(num_chunks, heads, k_dim, v_dim) > 1:
        return None
    if k_dim > _MOST_K:
        return f"K is {k_dim}, above {_MOST_K}"
    most = _PROGRAMS // (_FEWEST_SEGMENTS * triton.cdiv(v_dim, _BLOCK_V))
    if heads > most:
        return f"{heads} heads are walks enough, up to {most} with V = {v_dim} go through segments"
    return f"{num_chunks} chunks of 64 tokens are too few, {_FEWEST_SEGMENTS * _LEAST_CHUNKS} is the least"


def units_of_a_program(units: int, programs_of_a_unit: int, at_once: int, most: int) -> int:
    """As many, up to `most`, as let all programs come in whole waves of `at_once`, and those in few."""
    waves = max(1, triton.cdiv(units * programs_of_a_unit, at_once * most))
    shares = max(1, waves * at_once // programs_of_a_unit)
    return min(max(1, triton.cdiv(units, shares)), most)
