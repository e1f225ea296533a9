"""The forward pass of every family in plain PyTorch: clear rather than fast, the oracle of the engine.

Written from the models' definitions; shares no arithmetic with the engine. One sequence at a time, every loop
from scratch, keys and values quantized as a cache of the asked mode would hold them.
"""

from .model import Reference

__all__ = ["Reference"]
