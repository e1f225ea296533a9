"""The devices that a model can be loaded on."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from . import _core


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that the CUDA backend can use.

    device: what load_model takes, such as "cuda:0"; name: the maker's; capability: major and minor number of
    its instruction set; total_bytes: of its memory.
    """

    device: str
    name: str
    capability: tuple[int, int]
    total_bytes: int


def devices() -> list[Device]:
    """The usable GPUs, in the driver's order; none without a driver or in a build without CUDA.

    Makes no context and holds no memory. Devices too old for the compiled code are left out.
    """
    return [
        Device(device, name, divmod(capability, 10), total_bytes)
        for device, name, capability, total_bytes in _core.devices()
    ]


def wheel_folder() -> str:
    """The folder of installed packages that holds the wheel of cuBLASLt; "" where none does."""
    spec = importlib.util.find_spec("nvidia")  # a namespace: nothing is run
    for place in (spec and spec.submodule_search_locations) or ():
        if any(Path(place).glob("*/lib/libcublasLt.so.*")):
            return str(Path(place).parent)
    return ""
