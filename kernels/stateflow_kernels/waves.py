"""Sharing out work that could be any number of programs: the last wave of two and a bit takes as long as the others."""

import functools

import torch
import triton


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def units_of_a_program(units: int, programs_of_a_unit: int, at_once: int, most: int) -> int:
    """As many, up to `most`, as let all programs come in whole waves of `at_once`, and those in few."""
    waves = max(1, triton.cdiv(units * programs_of_a_unit, at_once * most))
    shares = max(1, waves * at_once // programs_of_a_unit)
    return min(max(1, triton.cdiv(units, shares)), most)
