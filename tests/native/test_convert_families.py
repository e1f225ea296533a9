"""Every family from a folder as published, through the file, to the logits of other code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tinyloop.native.convert import ConvertError, convert
from tinyloop.native.descriptor import check_descriptor, expected_tensors
from tinyloop.native.families import FAMILIES
from tinyloop.native.huggingface_source import open_huggingface
from tinyloop.native.reference import Reference
from tinyloop.native.reference.state import normal_state

from .official_models import CAUSAL, official_model, save_official
from .oracles import (
    NO_LOOP_NORM,
    NORM_ELSEWHERE,
    OTHER_ROTATION,
    SHARED_PLANE,
    LoopedLlamaOracle,
    RavenOracle,
)
from .source_folders import (
    HUGINN_CONFIG,
    NANBEIGE_CONFIG,
    OURO_CONFIG,
    RETROFIT_CONFIG,
    looped_llama_tensors,
    raven_tensors,
    write_folder,
)

IDS = np.random.default_rng(9).integers(0, 61, 24).astype(np.int32)
TORCH_IDS = torch.from_numpy(IDS.astype(np.int64))
# Both sides hold the same 16-bit weights and compute in float64; what differs is that one side keeps rotation
# angles, or their table, in float32.
LIMIT = 1e-5
# What a mistake in the arithmetic costs at the least, in the same unit: far above what rounding could.
FAULT_FLOOR = 1e-2


def _apart(found: NDArray[np.float64], expected: torch.Tensor) -> float:
    """The largest difference of two sets of logits, relative to the largest logit."""
    theirs = expected.detach().numpy()
    return float(np.abs(found - theirs).max() / np.abs(theirs).max())


def _frequencies(head_dim: int, theta: float) -> torch.Tensor:
    return (theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)).float()


# --- families that transformers has ---


def _official_logits(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.double()(TORCH_IDS[None], **inputs).logits[0]
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CAUSAL)
def test_plain_family_gives_the_librarys_logits(tmp_path: Path, family: str, tied: bool) -> None:
    model = official_model(family, tie_word_embeddings=tied)
    header = convert(save_official(tmp_path / "source", model), tmp_path / "m.tloop", 16)
    assert header.descriptor["family"] == {"mistral": "llama"}.get(family, family)
    found = Reference.load(tmp_path / "m.tloop").logits(IDS, 1)
    assert _apart(found, _official_logits(model)) < LIMIT


@pytest.mark.parametrize("prompt_len", [0, 1, 9, 24])
def test_two_stacks_give_the_librarys_logits_with_an_open_prompt(tmp_path: Path, prompt_len: int) -> None:
    model = official_model("hrm_text")
    header = convert(save_official(tmp_path / "source", model), tmp_path / "m.tloop", 16)
    assert (header.descriptor["n_layers"], header.descriptor["n_low"]) == (4, 2)
    expected = _official_logits(model, token_type_ids=(torch.arange(24) < prompt_len).long()[None])
    assert _apart(Reference.load(tmp_path / "m.tloop").logits(IDS, 2, prompt_len), expected) < LIMIT
    other = Reference.load(tmp_path / "m.tloop").logits(IDS, 2, 0 if prompt_len > 1 else 9)
    assert _apart(other, expected) > FAULT_FLOOR


@pytest.mark.parametrize("loops", [1, 3])
def test_two_stacks_give_the_librarys_logits_at_other_depths(tmp_path: Path, loops: int) -> None:
    model = official_model("hrm_text", H_cycles=loops)
    convert(save_official(tmp_path / "source", official_model("hrm_text")), tmp_path / "m.tloop", 16)
    assert _apart(Reference.load(tmp_path / "m.tloop").logits(IDS, loops), _official_logits(model)) < LIMIT


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of the authors' own exporter: gate, q, k and v in one, gate and up in one."""
    fused = {name: value for name, value in tensors.items() if "module.layers" not in name}
    for layer in {name.rsplit(".", 3)[0] for name in tensors if "module.layers" in name}:
        parts = [tensors[f"{layer}.self_attn.{part}_proj.weight"] for part in ("gate", "q", "k", "v")]
        fused[f"{layer}.attn.gqkv_proj.weight"] = torch.cat(parts)
        fused[f"{layer}.attn.o_proj.weight"] = tensors[f"{layer}.self_attn.o_proj.weight"]
        parts = [tensors[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        fused[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)
        fused[f"{layer}.mlp.down_proj.weight"] = tensors[f"{layer}.mlp.down_proj.weight"]
    return fused


@pytest.mark.parametrize("stated", [2, 4, 16])
@pytest.mark.parametrize("fused", [False, True])
def test_both_sets_of_names_and_every_meaning_of_the_layer_count(
    tmp_path: Path, fused: bool, stated: int
) -> None:
    model = official_model("hrm_text")
    saved = save_official(tmp_path / "saved", model)
    config = json.loads((saved / "config.json").read_text())
    del config["num_layers_per_stack"], config["embedding_scale"]
    config["num_hidden_layers"] = stated
    tensors = dict(model.state_dict())
    write_folder(tmp_path / "named", config, _fused(tensors) if fused else tensors)
    convert(saved, tmp_path / "saved.tloop", 16)
    convert(tmp_path / "named", tmp_path / "named.tloop", 16)
    ours, theirs = (Reference.load(tmp_path / f"{name}.tloop") for name in ("named", "saved"))
    assert ours.descriptor == theirs.descriptor
    assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


def test_layer_count_that_the_tensors_do_not_have_is_refused(tmp_path: Path) -> None:
    saved = save_official(tmp_path / "saved", official_model("hrm_text"))
    _edit(saved, lambda config: config.update(num_layers_per_stack=3))
    with pytest.raises(ConvertError, match="num_hidden_layers"):
        convert(saved, tmp_path / "m.tloop")


# --- families with code of their own ---


def _convert_raven(tmp_path: Path, kind: str, **overrides: Any) -> tuple[dict[str, Any], Path]:
    config = {**(HUGINN_CONFIG if kind == "huginn" else RETROFIT_CONFIG), **overrides}
    write_folder(tmp_path / "source", config, raven_tensors(config, kind))
    header = convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    assert header.descriptor["family"] == kind
    return config, tmp_path / "m.tloop"


def _raven_oracle(config: dict[str, Any], kind: str, fault: str = "") -> RavenOracle:
    theta = config["rope_base"] if kind == "huginn" else config["rope_theta"]
    return RavenOracle(config, raven_tensors(config, kind), kind, _frequencies(12, theta), fault)


def _embed_scale(kind: str) -> float:
    return 48**0.5 if kind == "huginn" else 1.0


RAVENS = ["huginn", "retrofit", "retrofit_olmo"]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", RAVENS)
def test_recurrent_core_gives_the_oracles_logits(tmp_path: Path, kind: str, steps: int) -> None:
    config, path = _convert_raven(tmp_path, kind)
    # A cut normal of the config's own std is scaled as the embedding is.
    std = (2 / (5 * 48)) ** 0.5 * 48**0.5 if kind == "huginn" else 0.0087
    for init, state in (("normal", normal_state(5, 24, 48, std)), ("zero", torch.zeros(24, 48))):
        reference = Reference.load(path, state_init=init, state_seed=5)
        expected = _raven_oracle(config, kind).logits(TORCH_IDS, steps, state, _embed_scale(kind))
        assert _apart(reference.logits(IDS, steps), expected) < LIMIT


FAULTS = [SHARED_PLANE, NORM_ELSEWHERE, OTHER_ROTATION, NO_LOOP_NORM]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", RAVENS)
def test_recurrent_core_with_a_mistake_would_be_noticed(tmp_path: Path, kind: str, fault: str) -> None:
    config, path = _convert_raven(tmp_path, kind)
    found = Reference.load(path, state_init="zero").logits(IDS, 3)
    oracle = _raven_oracle(config, kind, fault)
    if kind == "retrofit" and fault == NORM_ELSEWHERE:
        oracle.weights |= {  # the other kind's layer has these too
            f"{layer}.attn.{name}_norm.weight": torch.ones(48 if name == "q" else 24)
            for layer in {name.rsplit(".", 2)[0] for name in oracle.weights if "norm_1" in name}
            for name in "qk"
        }
    assert _apart(found, oracle.logits(TORCH_IDS, 3, torch.zeros(24, 48), _embed_scale(kind))) > FAULT_FLOOR


def test_state_may_start_from_the_input_but_not_skip_the_adapter(tmp_path: Path) -> None:
    config, path = _convert_raven(tmp_path, "retrofit_olmo", initial_state_mode="embed-init")
    oracle = _raven_oracle(config, "retrofit_olmo")
    given = oracle.weights["transformer.wte.weight"][TORCH_IDS]
    for i in range(config["n_layers_in_prelude"]):
        given = oracle.block(f"transformer.prelude.{i}", given)
    assert _apart(Reference.load(path).logits(IDS, 2), oracle.logits(TORCH_IDS, 2, given, 1.0)) < LIMIT
    _edit(tmp_path / "source", lambda c: c.update(initial_state_mode="skip-adapter"))
    with pytest.raises(ConvertError, match="initial_state_mode"):
        convert(tmp_path / "source", tmp_path / "m.tloop", overwrite=True)


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("config", [OURO_CONFIG, NANBEIGE_CONFIG], ids=["ouro", "nanbeige"])
def test_looped_stack_gives_the_oracles_logits(tmp_path: Path, config: dict[str, Any], loops: int) -> None:
    tensors = looped_llama_tensors(config)
    write_folder(tmp_path / "source", config, tensors)
    convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    oracle = LoopedLlamaOracle(config, tensors, _frequencies(16, 10000.0))
    reference = Reference.load(tmp_path / "m.tloop")
    assert _apart(reference.logits(IDS, loops), oracle.logits(TORCH_IDS, loops)) < LIMIT
    if config is OURO_CONFIG:
        assert _apart(reference.gates(IDS, loops), oracle.gates(TORCH_IDS, loops)) < LIMIT


@pytest.mark.parametrize("fault", [SHARED_PLANE, NORM_ELSEWHERE, OTHER_ROTATION, NO_LOOP_NORM])
def test_looped_stack_with_a_mistake_would_be_noticed(tmp_path: Path, fault: str) -> None:
    write_folder(tmp_path / "source", OURO_CONFIG, looped_llama_tensors(OURO_CONFIG))
    convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    oracle = LoopedLlamaOracle(
        OURO_CONFIG, looped_llama_tensors(OURO_CONFIG), _frequencies(16, 10000.0), fault
    )
    found = Reference.load(tmp_path / "m.tloop").logits(IDS, 3)
    assert _apart(found, oracle.logits(TORCH_IDS, 3)) > FAULT_FLOOR


def test_norm_after_all_loops_alone_is_taken(tmp_path: Path) -> None:
    config = {**NANBEIGE_CONFIG, "skip_loop_final_norm": True}
    tensors = looped_llama_tensors(config)
    write_folder(tmp_path / "source", config, tensors)
    convert(tmp_path / "source", tmp_path / "m.tloop", 16)
    oracle = LoopedLlamaOracle(config, tensors, _frequencies(16, 10000.0), NO_LOOP_NORM)
    assert _apart(Reference.load(tmp_path / "m.tloop").logits(IDS, 2), oracle.logits(TORCH_IDS, 2)) < LIMIT


# --- configs as published, at full size ---

HUGINN_PUBLISHED = {
    **HUGINN_CONFIG, "n_embd": 5280, "n_heads": 55, "num_key_value_heads": 55, "head_dim": 96,
    "intermediate_size": 17920, "vocab_size": 65536, "padded_vocab_size": 65536, "n_layers": 8,
    "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "block_size": 4096,
    "effective_expected_depth": 132,
    "init_values": {
        "std": 0.008703882797784892, "out_proj": 0.0005356869554443541, "embedding": 0.008703882797784892,
        "embed_scale": 72.6636084983398,
    },
}  # fmt: skip
NANBEIGE_PUBLISHED = {
    **NANBEIGE_CONFIG, "vocab_size": 166144, "hidden_size": 3072, "intermediate_size": 10752,
    "num_hidden_layers": 22, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "kv_channels": 128, "max_position_embeddings": 262144, "rope_theta": 70000000,
}  # fmt: skip
HRM_PUBLISHED = {
    "model_type": "hrm_text", "architectures": ["HrmTextForCausalLM"], "vocab_size": 65536,
    "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 128, "H_cycles": 2, "L_cycles": 3, "L_bp_cycles": [0, 3],
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "initializer_range": 0.025515518153991442,
    "embedding_scale": 39.191835884530846, "prefix_lm": True, "pad_token_id": 5, "bos_token_id": 6,
    "eos_token_id": 11,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "names", "parameters", "facts"),
    [
        # 15.65 GB of float32 of which a copy of the head is 1.38; a tally by hand; a published count.
        (
            HUGINN_PUBLISHED,
            ["transformer.core_block.0.norm_3.weight"],
            3.5657e9,
            {
                "n_layers": 8,
                "n_prelude": 2,
                "n_coda": 2,
                "loops": 32,
                "n_kv_heads": 55,
                "max_positions": 4096,
            },
        ),
        (
            NANBEIGE_PUBLISHED,
            [],
            2 * 166144 * 3072 + 22 * (2 * 6144 + 2 * 1024 + 3 * 10752 + 2) * 3072 + 3072,
            {"n_layers": 22, "loops": 2, "head_dim": 128},
        ),
        (
            {**HRM_PUBLISHED, "vocab_size": 131072, "num_hidden_layers": 32},
            [f"model.L_module.layers.{i}.attn.o_proj.weight" for i in range(16)],
            1_384_120_320,
            {"n_layers": 32, "n_low": 16, "low_cycles": 3, "loops": 2, "embed_scale": 39.191835884530846},
        ),
    ],
    ids=["huginn", "nanbeige", "hrm_text"],
)
def test_published_config_gives_the_published_size(
    config: dict[str, Any], names: list[str], parameters: float, facts: dict[str, Any]
) -> None:
    described = FAMILIES[config["model_type"]].describe(config, set(names))
    rest = {"bos_id": -1, "eos_ids": (), "add_bos": False, "chat_template": ""}
    descriptor = check_descriptor({**described, **rest})
    assert {key: descriptor[key] for key in facts} == facts
    buffers = ("rope.inv_freq", "low_init")
    tensors = expected_tensors(descriptor).items()
    found = sum(math.prod(dims) for name, dims in tensors if name not in buffers)
    assert found == pytest.approx(parameters, rel=1e-3 if config is HUGINN_PUBLISHED else 0)


def test_huginns_state_is_scaled_as_its_embedding_is() -> None:
    """Cut at three times 0.0087, then times sqrt(5280): 0.632, whether the config says so or is silent."""
    names = {"transformer.core_block.0.norm_3.weight"}
    silent = {key: value for key, value in HUGINN_PUBLISHED.items() if key != "init_values"}
    for config in (HUGINN_PUBLISHED, silent):
        described = FAMILIES["huginn_raven"].describe(config, names)
        assert described["state_std"] == pytest.approx(math.sqrt(2 / 5), rel=1e-6)
        assert described["embed_scale"] == pytest.approx(math.sqrt(5280), rel=1e-6)


# --- what a config or a tensor could mean that we do not compute ---


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def _edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


SOURCES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "huginn": (HUGINN_CONFIG, lambda: raven_tensors(HUGINN_CONFIG, "huginn")),
    "retrofit": (RETROFIT_CONFIG, lambda: raven_tensors(RETROFIT_CONFIG, "retrofit")),
    "nanbeige": (NANBEIGE_CONFIG, lambda: looped_llama_tensors(NANBEIGE_CONFIG)),
    "ouro": (OURO_CONFIG, lambda: looped_llama_tensors(OURO_CONFIG)),
}


@pytest.mark.parametrize(
    ("source", "field", "value", "named"),
    [
        ("huginn", "qk_bias", False, "qk_bias"),
        ("huginn", "injection_type", "add", "injection_type"),
        ("huginn", "state_init", "zero", "state_init"),
        ("huginn", "test_time_noise", 0.1, "test_time_noise"),
        ("huginn", "bias", True, "bias"),
        ("huginn", "block_class_name", "TransformerPreNormBlock", "block_class_name"),
        ("huginn", "nonlin_name", "GELU", "nonlin_name"),
        ("huginn", "n_layers", 8, "n_layers"),
        ("huginn", "rope_base", None, "rope_base"),
        ("huginn", "init_values", {"std": -1.0, "embed_scale": 1.0}, "init_values std"),
        ("huginn", "init_values", {"std": 0.1}, "embed_scale"),
        ("huginn", "num_attention_heads", 5, "n_heads"),
        ("huginn", "surprise", 1, "surprise"),
        ("retrofit", "qk_bias", True, "qk_bias"),
        ("retrofit", "rope_theta", None, "rope_theta"),
        ("retrofit", "rope_scaling", {"rope_type": "yarn"}, "yarn"),
        ("nanbeige", "enable_hyper_connection", True, "enable_hyper_connection"),
        ("nanbeige", "loop_share_kv", True, "loop_share_kv"),
        ("nanbeige", "loop_loss_weights", [0.5], "loop_loss_weights"),
        ("nanbeige", "emb_neighbor_num", 3, "emb_neighbor_num"),
        ("nanbeige", "kv_channels", 24, "head_dim"),
        ("nanbeige", "num_loops", None, "num_loops"),
        ("ouro", "total_ut_steps", None, "total_ut_steps"),
        ("ouro", "layer_types", ["sliding_attention"], "layer_types"),
    ],
)
def test_field_that_changes_the_arithmetic_is_refused_by_name(
    tmp_path: Path, source: str, field: str, value: object, named: str
) -> None:
    config, tensors = SOURCES[source]
    write_folder(tmp_path / "source", {**config, field: value}, tensors())
    with pytest.raises(ConvertError, match=named):
        convert(tmp_path / "source", tmp_path / "m.tloop")


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


@pytest.mark.parametrize("source", [*SOURCES, "hrm_text"])
def test_no_config_value_raises_anything_but_a_named_refusal(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "source"
    if source == "hrm_text":
        save_official(folder, official_model("hrm_text"))
    else:
        config, tensors = SOURCES[source]
        write_folder(folder, config, tensors())
    original = json.loads((folder / "config.json").read_text())
    refused = 0
    for field in dict.fromkeys(
        [*original, "init_values", "rope_scaling", "rope_theta", "initial_state_mode"]
    ):
        for value in ODD_VALUES:
            (folder / "config.json").write_text(json.dumps({**original, field: value}))
            try:
                open_huggingface(folder)
            except ConvertError as error:
                refused += 1
                # A sentence of ours, not the fallback that quotes an exception.
                assert error.__cause__ is None, (field, value, error)  # noqa: PT017
    assert refused > 150


@pytest.mark.parametrize(
    ("source", "change", "named"),
    [
        ("huginn", lambda t: t["lm_head.weight"].mul_(2), "lm_head"),
        ("huginn", lambda t: t.pop("transformer.core_block.1.attn.qk_bias"), "qk_bias"),
        ("huginn", lambda t: t.pop("transformer.coda.1.norm_4.weight"), "norm_4"),
        ("huginn", lambda t: t.update(freqs_cis=torch.ones(1, 64, 1, 6, 2)), "freqs_cis"),
        ("huginn", lambda t: t.update(freqs_cis=torch.ones(1, 64, 6, 2)), "freqs_cis"),
        ("retrofit", lambda t: t.pop("lm_head.weight"), "lm_head"),
        ("retrofit", lambda t: t.update({"transformer.coda.0.attn.q_norm.weight": torch.ones(48)}), "norm"),
        ("ouro", lambda t: t.pop("model.early_exit_gate.weight"), "early_exit_gate"),
        ("nanbeige", lambda t: t.update({"model.early_exit_gate.bias": torch.ones(1)}), "early_exit_gate"),
    ],
)
def test_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, source: str, change: Callable[[dict[str, torch.Tensor]], Any], named: str
) -> None:
    config, tensors = SOURCES[source]
    write_folder(tmp_path / "source", config, tensors())
    _edit_tensors(tmp_path / "source", change)
    with pytest.raises(ConvertError, match=named):
        convert(tmp_path / "source", tmp_path / "m.tloop")


def test_huginns_rotation_table_is_checked_and_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", HUGINN_CONFIG, raven_tensors(HUGINN_CONFIG, "huginn"))
    angles = torch.outer(torch.arange(64).float(), _frequencies(12, 50000))
    table = torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]
    _edit_tensors(tmp_path / "source", lambda tensors: tensors.update(freqs_cis=table.bfloat16()))
    header = convert(tmp_path / "source", tmp_path / "m.tloop")
    assert not [entry for entry in header.tensors if "freqs" in entry.name]


# --- a loop over some layers of a plain model ---


@pytest.mark.parametrize(("begin", "end", "loops"), [(0, 3, 2), (1, 2, 3), (0, 1, 4), (2, 3, 1)])
def test_looped_range_is_the_library_with_those_layers_repeated(
    tmp_path: Path, begin: int, end: int, loops: int
) -> None:
    model = official_model("llama")
    save_official(tmp_path / "source", model)
    header = convert(tmp_path / "source", tmp_path / "m.tloop", 16, loop_range=(begin, end, loops))
    assert header.descriptor["loops"] == loops
    assert str(end - 1) in header.metadata["loop"]
    layers = list(model.model.layers)
    model.model.layers = torch.nn.ModuleList([*layers[:begin], *(loops * layers[begin:end]), *layers[end:]])
    model.config.num_hidden_layers = len(model.model.layers)
    with torch.no_grad():
        expected = model.double()(TORCH_IDS[None], use_cache=False).logits[0]
    assert _apart(Reference.load(tmp_path / "m.tloop").logits(IDS, loops), expected) < LIMIT


@pytest.mark.parametrize("loop_range", [(2, 2, 2), (-1, 2, 2), (0, 4, 2), (0, 2, 0)])
def test_range_that_the_model_does_not_have_is_refused(
    tmp_path: Path, loop_range: tuple[int, int, int]
) -> None:
    save_official(tmp_path / "source", official_model("llama"))
    with pytest.raises(ConvertError, match="loop layers"):
        convert(tmp_path / "source", tmp_path / "m.tloop", loop_range=loop_range)


def test_model_that_loops_already_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", OURO_CONFIG, looped_llama_tensors(OURO_CONFIG))
    with pytest.raises(ConvertError, match="loops 4"):
        convert(tmp_path / "source", tmp_path / "m.tloop", loop_range=(0, 1, 2))
