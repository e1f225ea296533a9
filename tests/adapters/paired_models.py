"""One small Llama with the same weights twice: a folder for transformers and a model file of ours.

Every weight is one that 16 bits hold exactly, so both compute with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from official_models import official_model
from tinyloop.native.convert import convert
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 384
WINDOW = 128
BOS, EOS = "<s>", "</s>"
TEXT = (
    "The keeper of the lighthouse counted the ships that passed before dawn. Some carried salt, some carried "
    "letters, and one carried nothing at all. He wrote their names in a long green book, and when the book "
    "was full he began another. Nobody had asked him to; nobody asked him to stop. In winter, when no ships "
    "came, he read the old books aloud to the dog, who liked the salt ships best. What is the colour of the "
    "book? How many ships passed before noon? The answer is twelve. The question was never answered. "
)
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, slots=True)
class PairedModel:
    """folder: as transformers reads it; file: as we do; tokenizer: of both."""

    folder: Path
    file: Path
    tokenizer: Tokenizer


def trained_tokenizer(*, adds_bos: bool) -> Tokenizer:
    """Byte-level BPE, trained here and now; <s> is 0, </s> is 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


def paired_model(folder: Path, *, adds_bos: bool) -> PairedModel:
    tokenizer = trained_tokenizer(adds_bos=adds_bos)
    model = official_model("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=WINDOW)
    model.save_pretrained(folder / "source")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder / "source")
    convert(folder / "source", folder / "model.tloop", bits=16)
    return PairedModel(folder / "source", folder / "model.tloop", tokenizer)
