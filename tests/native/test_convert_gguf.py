"""GGUF files: rotation put back, own blocks kept, tokenizer rebuilt; held against transformers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tinyloop.native.convert import ConvertError, convert
from tinyloop.native.format import read_header, read_tensor
from tinyloop.native.gguf_source import open_gguf
from tinyloop.native.reference import Reference
from tinyloop.native.tokenizer import load_tokenizer
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ċ Ċ", "e r"]
TOKENS = ["<|endoftext|>", "<|im_start|>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
VOCAB = len(TOKENS)
TEXTS = [
    "the thinner inn",
    " 12345 and 3.14",
    "a\n\n b's don't",
    "naïve 🙂",
    "<|im_start|>the<|endoftext|>",
    "  \t x",
]


def _shapes(architecture: str = "llama") -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        shapes |= {f"blk.{i}.attn_{name}.weight": (n, HIDDEN) for name, n in rows.items()}
        shapes |= {f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN), f"blk.{i}.ffn_down.weight": (HIDDEN, FFN)}
        shapes |= {f"blk.{i}.ffn_{name}.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
        if architecture == "qwen2":
            shapes |= {f"blk.{i}.attn_{name}.bias": (n,) for name, n in rows.items()}
        if architecture == "qwen3":
            shapes |= {f"blk.{i}.attn_{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    return shapes


def _write(
    path: Path,
    kind: Kind,
    *,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    pre: str = "smollm",
) -> Path:
    """A tiny file whose matrices are of `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (VOCAB - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for name, value in (fields or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(architecture).items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + values / 5 if len(shape) == 1 else values / 8
        _add(writer, name, values, Kind.F32 if len(shape) == 1 else kind)
    for name, values in (tensors or {}).items():
        _add(writer, name, values, Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: Kind) -> None:
    if kind == Kind.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _transformers_logits(path: Path, ids: NDArray[np.int32], **config: int) -> NDArray[np.float64]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **config
        )
    with torch.no_grad():
        logits: NDArray[np.float64] = (
            model.double()(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
        )
    return logits


# What each source kind loses in a file of these bits; own blocks lose only the rounding of their zeros.
@pytest.mark.parametrize(
    ("kind", "bits", "group", "limit"),
    [
        (Kind.F32, 16, 64, 2e-3),
        (Kind.Q4_1, 16, 64, 2e-3),
        (Kind.Q4_1, 4, 32, 4e-3),
        (Kind.Q8_0, 8, 32, 1e-6),
        (Kind.Q8_0, 16, 64, 2e-3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_file_gives_transformers_logits(
    tmp_path: Path, kind: Kind, bits: int, group: int, limit: float
) -> None:
    path = _write(tmp_path / "tiny.gguf", kind)
    convert(path, tmp_path / "m.tloop", bits, group)
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).astype(np.int32)
    expected = _transformers_logits(path, ids)
    found = Reference.load(tmp_path / "m.tloop").logits(ids, 1)
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_give_transformers_logits(tmp_path: Path, architecture: str, kind: Kind) -> None:
    sizes = {"qwen3.attention.key_length": HEAD_DIM, "qwen3.attention.value_length": HEAD_DIM}
    fields = sizes if architecture == "qwen3" else {}
    path = _write(tmp_path / "tiny.gguf", kind, architecture=architecture, pre="qwen2", fields=fields)
    bits, group, limit = (8, 32, 1e-6) if kind == Kind.Q8_0 else (16, 64, 2e-3)
    assert convert(path, tmp_path / "m.tloop", bits, group).descriptor["family"] == architecture
    ids = np.random.default_rng(1).integers(0, VOCAB, 20).astype(np.int32)
    # Its reader takes 128 for the head size of qwen3 whatever the file says.
    expected = _transformers_logits(path, ids, **({"head_dim": HEAD_DIM} if fields else {}))
    found = Reference.load(tmp_path / "m.tloop").logits(ids, 1)
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_qwen_tokenizer_gives_the_ids_of_the_librarys(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", Kind.F32, architecture="qwen2", pre="qwen2")
    ours = load_tokenizer(convert(path, tmp_path / "m.tloop", 8, 64))
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(TOKENS)}, merges=merges)
    for text in [*TEXTS, "e\u0301 1234", "in  the\n\n  then"]:
        if "<|im_start|>" not in text:
            assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False), text


def test_own_blocks_are_named_in_the_recipe_and_need_their_group(tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", Kind.Q4_1)
    own = convert(path, tmp_path / "own.tloop", 4, 32)
    anew = convert(path, tmp_path / "anew.tloop", 4, 64)
    assert "own codes" in own.metadata["recipe"]
    assert "own codes" not in anew.metadata["recipe"]


def test_tokenizer_gives_the_ids_of_the_original(tmp_path: Path) -> None:
    """Against transformers, with the digit split that its reader leaves out put back."""
    path = _write(tmp_path / "tiny.gguf", Kind.F32)
    ours = load_tokenizer(convert(path, tmp_path / "m.tloop", 8, 64))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_rope_divisors_are_applied(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2).astype(np.float32)
    path = _write(tmp_path / "tiny.gguf", Kind.F32, tensors={"rope_freqs.weight": divisors})
    convert(path, tmp_path / "m.tloop", 8, 64)
    header = read_header(tmp_path / "m.tloop")
    found = read_tensor(tmp_path / "m.tloop", header, "rope.inv_freq")
    assert np.allclose(found, 50000.0 ** -(np.arange(8) / 8) / divisors, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "tensors", "name"),
    [
        ({"llama.expert_count": 4}, {}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, {}, "sliding_window"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "yarn"),
        ({"llama.rope.dimension_count": 8}, {}, "dimension_count"),
        ({"llama.rope.freq_base_x": 1}, {}, "freq_base_x"),
        ({"llama.rope.scaling.type": "linear"}, {}, "factor"),
        ({"tokenizer.ggml.eot_token_id": "x"}, {}, "eot_token_id"),
        ({"tokenizer.ggml.eot_token_id": 10**6}, {}, "eos_ids"),
        ({}, {"rope_freqs.weight": np.zeros(HEAD_DIM // 2, np.float32)}, "rope_freqs"),
        ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "attn_q.bias"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], tensors: dict[str, Any], name: str
) -> None:
    path = _write(tmp_path / "tiny.gguf", Kind.F32, fields=fields, tensors=tensors)
    with pytest.raises(ConvertError, match=name):
        convert(path, tmp_path / "m.tloop")


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type", "model", "pre", "eos_token_id"])
@pytest.mark.parametrize("value", [None, 5, "x", ["x"], [[1]], [5]])
def test_a_tokenizer_field_of_any_type_is_refused_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    """Whatever the reader of the file hands over."""
    path, name = _write(tmp_path / "tiny.gguf", Kind.F32), f"tokenizer.ggml.{key}"
    contents = gguf.ReaderField.contents

    def changed(field: gguf.ReaderField) -> object:
        return value if field.name == name else contents(field)

    monkeypatch.setattr(gguf.ReaderField, "contents", changed)
    if key == "eos_token_id" and value == 5:
        assert convert(path, tmp_path / "m.tloop").descriptor["eos_ids"] == (5,)
        return
    with pytest.raises(ConvertError, match=r"tokenizer\.ggml"):
        convert(path, tmp_path / "m.tloop")


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_header_raises_nothing_but_a_refusal(tmp_path: Path, seed: int) -> None:
    path = _write(tmp_path / "tiny.gguf", Kind.F32)
    content, rng = path.read_bytes(), np.random.default_rng(seed)
    header_bytes = content.index(b"token_embd.weight") + 200
    # A new file each time: the one before may still be mapped.
    for i in range(15):
        damaged = bytearray(content)
        damaged[rng.integers(header_bytes)] ^= 1 << int(rng.integers(8))
        other = tmp_path / f"{i}.gguf"
        other.write_bytes(damaged if rng.integers(4) else damaged[: rng.integers(header_bytes)])
        with suppress(ConvertError):
            open_gguf(other, 4, 64)


@pytest.mark.parametrize(
    ("name", "shape"), [("blk.1.ffn_up.weight", (FFN, 32)), ("blk.0.attn_k.weight", (7, HIDDEN))]
)
def test_a_matrix_of_another_shape_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    changed = _shapes() | {name: shape}
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_shapes", lambda architecture: changed)
        path = _write(tmp_path / "tiny.gguf", Kind.F32)
    with pytest.raises(ConvertError, match=name):
        convert(path, tmp_path / "m.tloop")


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ConvertError, match=r"x\.gguf"):
        convert(tmp_path / "x.gguf", tmp_path / "m.tloop")
