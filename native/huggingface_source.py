"""A Hugging Face folder as a source model; what each family is made of stands in `families`.

A config field is either used, known to be harmless, or must have the one value we compute with; anything
else could change the arithmetic and is refused by name. The same goes for tensors: each is used or refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from .descriptor import Descriptor, check_descriptor
from .families import FAMILIES, Config, Family
from .families.fields import integer_field
from .records import FormatError, Value
from .safetensors_folder import SafetensorsFolder
from .source import ConvertError, SourceModel, reading
from .tensor_plan import TensorPlan


def open_huggingface(folder: Path) -> SourceModel:
    """Understand the folder; weights are read later, one at a time.

    Raises: ConvertError naming the config field or tensor that cannot be converted exactly.
    """
    config = _read_json(folder / "config.json")
    family = _checked_family(config)
    weights = SafetensorsFolder(folder)
    tokenizer_json = _read_tokenizer(folder)
    descriptor = _descriptor(family, config, weights, folder, tokenizer_json)
    frequencies = family.frequencies(config, descriptor)
    plan = TensorPlan(family, descriptor, weights)
    load = {**plan.loads(), "rope.inv_freq": lambda: frequencies}
    if left := sorted(weights.names() - plan.used - plan.repeated(frequencies)):
        raise ConvertError(f"tensor {left[0]!r}: not part of the family ({len(left)} such tensors)")
    metadata = {"name": folder.resolve().name, "license": "", "source": "Hugging Face folder"}
    return SourceModel(descriptor, load, tokenizer_json, metadata)


def _read_json(path: Path) -> dict[str, object]:
    with reading(str(path)):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConvertError(f"read {path}: expected an object, found {type(values).__name__}")
    return values


def _checked_family(config: Config) -> Family:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConvertError(f"config model_type {name!r}: {sorted(FAMILIES)} can be converted")
    family = FAMILIES[name]
    for key, value in config.items():
        # A window that the config itself switches off has no effect.
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if key == "layer_types":
            full = isinstance(value, list) and value and all(kind == "full_attention" for kind in value)
            if value is not None and not full:
                raise ConvertError(f"config layer_types {value!r}: only full_attention can be converted")
        elif key == "is_encoder_decoder":
            if value:
                raise ConvertError(
                    f"config {key} {value!r}: a prompt that is encoded apart has no scores of its "
                    "continuation's joint text: only models of one sequence can be converted"
                )
        elif key in family.only:
            if value not in family.only[key]:
                raise ConvertError(f"config {key} {value!r}: only {family.only[key][0]!r} can be converted")
        elif key not in family.used | family.harmless | {"model_type"}:
            raise ConvertError(f"config {key!r}: unknown field, it could change the arithmetic")
    return family


def _descriptor(
    family: Family, config: Config, weights: SafetensorsFolder, folder: Path, tokenizer_json: bytes
) -> Descriptor:
    bos_id = integer_field(config, "bos_token_id", default=-1)
    values: dict[str, Value] = {
        **family.describe(config, weights.names()),
        "bos_id": bos_id,
        "eos_ids": _eos_ids(config, folder),
        "add_bos": _adds_bos(folder, tokenizer_json, bos_id),
        "chat_template": _chat_template(folder),
    }
    try:
        return check_descriptor(values)
    except FormatError as error:
        raise ConvertError(f"config: {error}") from None


def _eos_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """generation_config.json knows the chat model's stop ids; config.json is the fallback."""
    generation = folder / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    ids = found if isinstance(found, list) else [found]
    if any(isinstance(value, bool) or not isinstance(value, int) for value in ids):
        raise ConvertError(f"config eos_token_id: expected an integer or a list of them, found {found!r}")
    return tuple(ids)


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConvertError(f"read {path}: missing; save the model's fast tokenizer there")
    values = _read_json(path)
    with reading(str(path)):
        # Without its indentation a tokenizer is half the size.
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def _adds_bos(folder: Path, tokenizer_json: bytes, bos_id: int) -> bool:
    with reading(str(folder / "tokenizer.json")):
        encoded = Tokenizer.from_str(tokenizer_json.decode()).encode("a").ids
    return bos_id >= 0 and encoded[:1] == [bos_id]


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        with reading(str(path)):
            return path.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = _read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        with reading(f"chat_template in {path}"):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else ""
