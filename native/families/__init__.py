"""The Hugging Face families that can be converted, as data: config fields, tensor names, what they mean."""

from . import hrm_text, llama, raven
from .family import Config, Family, Layer, Part

FAMILIES: dict[str, Family] = {**llama.FAMILIES, **raven.FAMILIES, **hrm_text.FAMILIES}

__all__ = ["FAMILIES", "Config", "Family", "Layer", "Part"]
