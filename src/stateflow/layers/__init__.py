"""Layers. Every mixer keeps one contract: (x, state, docs) -> (y, state')."""

from .attention import Attention
from .block import Block
from .feed_forward import FeedForward
from .gated_delta_net import DecayGate, GatedDeltaNet, ShortConv
from .mamba3 import Mamba3, Mamba3Dynamics
from .mixer import HeadGroups, Mixer, State, StateSpec
from .norm import GatedRMSNorm

__all__ = [
    "Attention",
    "Block",
    "DecayGate",
    "FeedForward",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "HeadGroups",
    "Mamba3",
    "Mamba3Dynamics",
    "Mixer",
    "ShortConv",
    "State",
    "StateSpec",
]
