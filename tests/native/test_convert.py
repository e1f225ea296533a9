"""Hugging Face folders: exact weights for what is understood, refusal by name for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinyloop.native.convert import ConvertError, convert
from tinyloop.native.huggingface_source import open_huggingface
from tinyloop.native.reference import Reference
from transformers import LlamaConfig, LlamaForCausalLM

from .source_folders import tiny_tokenizer
from .tiny_models import random_tensors, tiny_descriptor

IDS = np.random.default_rng(9).integers(0, 61, 24).astype(np.int32)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**(fields | overrides))).eval()
    for weight in model.parameters():
        weight.data = weight.data.half().float()  # what 16 bits hold exactly
    return model


def _save_llama(folder: Path, model: LlamaForCausalLM, *, bos: bool = False, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    tiny_tokenizer(bos=bos).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    return _save_llama(tmp_path / "llama", _llama())


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, {}),
        ({}, {"max_shard_size": "20KB"}),
        ({"tie_word_embeddings": True}, {}),
        ({"rope_parameters": {"rope_theta": 5e4, **LLAMA3}}, {}),
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "linear", "factor": 2.0}}, {}),
        ({"head_dim": 12, "num_key_value_heads": 1}, {}),
    ],
    ids=["plain", "sharded", "tied", "llama3", "linear", "head_dim"],
)
def test_llama_folder_gives_the_same_logits(
    tmp_path: Path, overrides: dict[str, Any], options: dict[str, Any]
) -> None:
    model = _llama(**overrides)
    _save_llama(tmp_path / "source", model, **options)
    header = convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].numpy()
    found = Reference.load(tmp_path / "m.tloop").logits(IDS, 1)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert header.descriptor["eos_ids"] == (1, 2)


def test_bfloat16_folder_is_read_exactly(tmp_path: Path) -> None:
    model = _llama().bfloat16()
    _save_llama(tmp_path / "source", model)
    convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    found = Reference.load(tmp_path / "m.tloop").weights["layers.1.down"]
    assert torch.equal(found, model.state_dict()["model.layers.1.mlp.down_proj.weight"].to(torch.float64))


@pytest.mark.parametrize("bos", [False, True])
def test_bos_policy_is_the_tokenizers_own(tmp_path: Path, bos: bool) -> None:
    _save_llama(tmp_path / "source", _llama(), bos=bos)
    assert convert(tmp_path / "source", tmp_path / "m.tloop", 8, 32).descriptor["add_bos"] is bos


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma"),
        ("model_type", "t5"),
        ("is_encoder_decoder", True),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("sliding_window", 64),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
        ("logit_scale", 0.25),
        ("num_attention_heads", "four"),
        ("num_key_value_heads", 3),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "surprise": 1}),
        ("total_ut_steps", 4),
    ],
)
def test_config_that_is_not_understood_is_refused_by_name(
    llama_folder: Path, field: str, value: object
) -> None:
    def change(config: dict[str, Any]) -> None:
        if field == "rope_scaling":
            config.pop("rope_parameters", None)
        config[field] = value

    _edit(llama_folder / "config.json", change)
    name = {"num_key_value_heads": "n_kv_heads", "rope_parameters": "surprise"}.get(field, field)
    with pytest.raises(ConvertError, match=name):
        convert(llama_folder, llama_folder / "m.tloop")
    assert not (llama_folder / "m.tloop").exists()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.self_attn.q_norm.weight", torch.ones(8)),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(64, 32)),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
        ("model.layers.1.self_attn.o_proj.weight", torch.full((32, 32), 1e5)),
        ("model.layers.1.mlp.down_proj.weight", torch.full((32, 64), torch.inf)),
        ("model.layers.1.mlp.gate_proj.weight", torch.ones(63, 32)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, 31)),
        ("model.layers.0.mlp.gate_proj.weight", torch.ones(64)),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(0, 32)),
        ("model.layers.0.input_layernorm.weight", torch.ones(1, 32)),
        ("model.embed_tokens.weight", torch.ones(61, 32, dtype=torch.int8)),
    ],
)
def test_tensor_that_is_not_understood_is_refused_by_name(
    llama_folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    tensors = load_file(llama_folder / "model.safetensors") | {name: tensor}
    save_file({k: v for k, v in tensors.items() if v is not None}, llama_folder / "model.safetensors")
    ours = {"o_proj": "layers.1.o", "down_proj": "layers.1.down"}
    expected = ours.get(name.split(".")[-2], name) if "layers.1" in name else name
    with pytest.raises(ConvertError, match=expected):
        convert(llama_folder, llama_folder / "m.tloop", 16)
    assert not [path for path in llama_folder.iterdir() if "tloop" in path.name]


WRONG_JSON = [b"", b"{}", b"[]", b"{", b"null", b"\xff", b"[" * 100_000, b'{"x": "\\ud800"}']


@pytest.mark.parametrize("content", WRONG_JSON, ids=range(len(WRONG_JSON)))
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_json_file_that_cannot_be_meant_is_named(llama_folder: Path, name: str, content: bytes) -> None:
    (llama_folder / name).write_bytes(content)
    with pytest.raises(ConvertError, match=name.removesuffix(".json")):
        convert(llama_folder, llama_folder / "m.tloop")


@pytest.mark.parametrize("content", WRONG_JSON, ids=range(len(WRONG_JSON)))
@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_no_file_of_a_folder_raises_what_its_parser_does(
    llama_folder: Path, name: str, content: bytes
) -> None:
    (llama_folder / name).write_bytes(content)
    try:
        convert(llama_folder, llama_folder / "m.tloop")
    except ConvertError as error:
        assert name in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "weight_map", [[], "x", {}, {"a": 1}, {"a": None}, {"a": ["x"]}, {"a": ""}, {"a": ".."}, {"a": "gone"}]
)
def test_an_index_that_cannot_be_meant_is_refused(llama_folder: Path, weight_map: object) -> None:
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConvertError, match=r"index\.json|weights in"):
        convert(llama_folder, llama_folder / "m.tloop")


ODD_VALUES = [
    "x",
    "1",
    [],
    [[1]],
    {},
    {"x": 1},
    -1,
    0,
    10**400,
    1e-400,
    float("nan"),
    float("inf"),
    True,
    None,
]


def test_no_config_value_raises_anything_but_a_named_refusal(llama_folder: Path) -> None:
    path = llama_folder / "config.json"
    original = json.loads(path.read_text())
    fields = [*original, "rope_scaling", "rope_theta", "layer_types", "head_dim", "tie_word_embeddings"]
    refused = 0
    for field in dict.fromkeys(fields):
        for value in ODD_VALUES:
            config = original | {field: value}
            if field == "rope_scaling":
                config.pop("rope_parameters")
            path.write_text(json.dumps(config))
            try:
                open_huggingface(llama_folder)
            except ConvertError as error:
                refused += 1
                # A sentence of ours, not the fallback that quotes an exception.
                assert error.__cause__ is None, (field, value, error)  # noqa: PT017
    assert refused > 150


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
@pytest.mark.parametrize("value", ["x", 0, -1.0, float("nan"), float("inf"), None, [1]])
def test_no_rope_value_raises_anything_but_a_named_refusal(
    llama_folder: Path, key: str, value: object
) -> None:
    _edit(llama_folder / "config.json", lambda config: config.update(rope_parameters={**LLAMA3, key: value}))
    with pytest.raises(ConvertError, match="rope_scaling"):
        convert(llama_folder, llama_folder / "m.tloop")


def test_looped_folder_keeps_every_weight_and_the_loop_count(tmp_path: Path) -> None:
    descriptor = tiny_descriptor("ouro", hidden_size=64)
    tensors = {name: value.astype(np.float16) for name, value in random_tensors(descriptor, 4).items()}
    theirs = {
        "model.embed_tokens.weight": tensors["embed"],
        "model.norm.weight": tensors["final_norm"],
        "lm_head.weight": tensors["head"],
        "model.early_exit_gate.weight": tensors["exit_gate.weight"][None],
        "model.early_exit_gate.bias": tensors["exit_gate.bias"],
    }
    for i in range(2):
        layer, ours = f"model.layers.{i}", f"layers.{i}"
        for name, part in zip("qkv", np.split(tensors[f"{ours}.qkv"], 3), strict=True):
            theirs[f"{layer}.self_attn.{name}_proj.weight"] = part
        theirs[f"{layer}.self_attn.o_proj.weight"] = tensors[f"{ours}.o"]
        for name, part in zip(("gate", "up"), np.split(tensors[f"{ours}.gate_up"], 2), strict=True):
            theirs[f"{layer}.mlp.{name}_proj.weight"] = part
        theirs[f"{layer}.mlp.down_proj.weight"] = tensors[f"{ours}.down"]
        for name, norm in {
            "input_layernorm": "norm_attn_in",
            "input_layernorm_2": "norm_attn_out",
            "post_attention_layernorm": "norm_ffn_in",
            "post_attention_layernorm_2": "norm_ffn_out",
        }.items():
            theirs[f"{layer}.{name}.weight"] = tensors[f"{ours}.{norm}"]
    config = {
        "model_type": "ouro",
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    save_file({k: torch.from_numpy(v.copy()) for k, v in theirs.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    header = convert(tmp_path, tmp_path / "m.tloop", 16)
    assert header.descriptor == {**descriptor, "chat_template": "{{ x }}"}
    loaded = Reference.load(tmp_path / "m.tloop")
    for name, value in tensors.items():
        if name != "rope.inv_freq":
            assert np.array_equal(loaded.weights[name].numpy(), value.astype(np.float64)), name
    assert np.allclose(loaded.weights["rope.inv_freq"], 10000.0 ** -(np.arange(8) / 8), rtol=1e-7)


def test_existing_file_is_kept_unless_asked(llama_folder: Path) -> None:
    destination = llama_folder / "m.tloop"
    destination.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        convert(llama_folder, destination)
    assert destination.read_bytes() == b"mine"
    convert(llama_folder, destination, overwrite=True)
    assert destination.read_bytes() != b"mine"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_a_file_of_the_source_is_never_replaced(llama_folder: Path, name: str) -> None:
    before = {path: path.read_bytes() for path in llama_folder.iterdir()}
    with pytest.raises(ConvertError, match="belongs to the source"):
        convert(llama_folder, llama_folder / name, overwrite=True)
    assert {path: path.read_bytes() for path in llama_folder.iterdir()} == before


def test_quantized_recipe_names_bits_and_group(llama_folder: Path) -> None:
    header = convert(llama_folder, llama_folder / "m.tloop", 4, 32, metadata={"license": "MIT"})
    assert {entry.kind for entry in header.tensors} == {"q4", "f32"}
    assert "4 bits" in header.metadata["recipe"]
    assert "32" in header.metadata["recipe"]
    assert header.metadata["license"] == "MIT"
