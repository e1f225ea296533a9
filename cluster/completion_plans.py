"""Rows of a generation job to requests for a pool: which ids, which stops, which seeds.

Nothing here knows of pools, windows or files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .chat_template import ChatTemplate, ChatTemplateError
from .completion_task import Completion, CompletionSettings, Conversation, PromptIds, PromptText
from .completion_text import Vocabulary
from .encoding import Encoder
from .errors import RowError
from .generate_items import Prompt
from .items import Int32Array
from .rows import Row, RowFailure, read_text

LongPrompt = Literal["truncate", "error"]
NO_TEMPLATE = "the model has no chat template: give one with --chat-template"


@dataclass(frozen=True, slots=True)
class GenerationModel:
    """What planning needs to know of a model beside its encoder.

    depth: loops of a row that does not say. template: None if there is none; template_fault: why not.
    """

    eos_ids: tuple[int, ...]
    loops: int
    depth: int
    has_exit_gate: bool
    template: ChatTemplate | None = None
    template_fault: str = NO_TEMPLATE

    @classmethod
    def of(
        cls, descriptor: Mapping[str, Any], depth: int, encoder: Encoder, template: str = ""
    ) -> GenerationModel:
        """From a model's descriptor. template: in place of its own. Raises: ChatTemplateError for it."""
        fault = NO_TEMPLATE
        try:
            chat = ChatTemplate.of_model(descriptor, encoder.tokenizer, template)
        except ChatTemplateError as error:
            if template:
                raise
            # Rows without messages do not need it.
            chat, fault = None, f"the model's {error}: give another with --chat-template"
        eos_ids = tuple(int(number) for number in descriptor["eos_ids"])
        loops, gate = int(descriptor["loops"]), bool(descriptor.get("exit_gate", False))
        return cls(eos_ids, loops, depth, gate, chat, fault)


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A row and its requests, one a completion. ids: int32 [n], the prompt after truncation."""

    row: Row
    ids: Int32Array
    n_truncated: int
    bos_truncated: bool
    stops: tuple[str, ...]
    requests: tuple[Prompt, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class CompletionPlanner:
    """Plans rows for one model and job."""

    def __init__(
        self,
        encoder: Encoder,
        model: GenerationModel,
        *,
        seed: int = 0,
        long_prompt: LongPrompt = "truncate",
        replace_surrogates: bool = False,
    ) -> None:
        self._encoder = encoder
        self._model = model
        self._seed = seed
        self._long_prompt = long_prompt
        self._replace_surrogates = replace_surrogates
        self.vocabulary = Vocabulary(encoder.tokenizer)

    def plan(self, rows: Sequence[Row]) -> list[CompletionPlan | RowFailure]:
        """Encode a batch of rows in one go; one plan or failure a row, in order."""
        texts = [self._text(row) for row in rows]
        encoded = iter(self._encoder.encode_texts([text for text in texts if isinstance(text, str)]))
        plans: list[CompletionPlan | RowFailure] = []
        for row, text in zip(rows, texts, strict=True):
            ids = next(encoded) if isinstance(text, str) else text
            try:
                if isinstance(ids, RowError):
                    raise ids
                plans.append(self._plan(row, _task(row), ids))
            except RowError as error:
                plans.append(RowFailure.of(row, error))
        return plans

    def _text(self, row: Row) -> str | RowError | None:
        """What is to be encoded; None if the row gives ids."""
        prompt = _task(row).prompt
        if isinstance(prompt, PromptText):
            return prompt.text
        if isinstance(prompt, PromptIds):
            return None
        try:
            return self._rendered(prompt)
        except RowError as error:
            return error

    def _rendered(self, prompt: Conversation) -> str:
        template = self._model.template
        if template is None:
            raise RowError("no_chat_template", self._model.template_fault)
        try:
            text = template.render(prompt.messages)
        except ChatTemplateError as error:
            raise RowError("chat_template", str(error)) from error
        return read_text("messages", text, replace_surrogates=self._replace_surrogates)

    def _plan(self, row: Row, task: Completion, encoded: Int32Array | None) -> CompletionPlan:
        settings = task.settings
        self.refuse(settings)
        ids = self._opened(task, encoded)
        n_truncated = max(0, len(ids) - self._room(settings))
        if n_truncated and self._long_prompt == "error":
            raise RowError(
                "prompt_too_long",
                f"prompt has {len(ids)} tokens, {self._room(settings)} are left beside max_new_tokens "
                f"{settings.max_new_tokens}: shorten it or raise --max-seq-len",
            )
        kept = self._encoder.check_ids(ids[n_truncated:])
        # A special token is never in the text, so a stop string that spells one is met as an id.
        specials = [self.vocabulary.special_id(stop) for stop in settings.stop]
        own = (*settings.stop_ids, *(number for number in specials if number is not None))
        return CompletionPlan(
            row=row,
            ids=kept,
            n_truncated=n_truncated,
            bos_truncated=n_truncated > 0 and ids[0] == self._encoder.policy.bos_id,
            stops=settings.stop,
            requests=tuple(
                self._request(kept, settings, own, seed) for seed in seeds(settings, self._seed, row.id)
            ),
        )

    def refuse(self, settings: CompletionSettings) -> None:
        """Raises: RowError invalid_setting, token_out_of_range or prompt_too_long if the model cannot."""
        depth = self._model.depth if settings.depth is None else settings.depth
        if depth > 1 and self._model.loops == 1:
            raise RowError(
                "invalid_setting", f"depth is {depth}, the model is not a looped one: leave it out"
            )
        if settings.min_depth > depth:
            raise RowError(
                "invalid_setting", f"min_depth is {settings.min_depth}: it must be 1 to the depth, {depth}"
            )
        gated = settings.exit_threshold is not None and settings.exit_threshold < 1
        if gated and not self._model.has_exit_gate:
            raise RowError(
                "invalid_setting",
                f"exit_threshold is {settings.exit_threshold}, the model has no exit gate: leave it out",
            )
        self._encoder.check_ids(list(settings.stop_ids))
        if self._room(settings) < 1:
            raise RowError(
                "prompt_too_long",
                f"max_new_tokens is {settings.max_new_tokens}, the window has "
                f"{self._encoder.policy.max_rows} "
                "tokens: no prompt fits beside it: ask for fewer or raise --max-seq-len",
            )

    def _room(self, settings: CompletionSettings) -> int:
        """Tokens that a prompt may have (R19)."""
        return self._encoder.policy.max_rows - settings.max_new_tokens

    def _opened(self, task: Completion, encoded: Int32Array | None) -> list[int]:
        """The prompt's ids with BOS where one belongs, before truncation; at least one."""
        policy = self._encoder.policy
        if isinstance(task.prompt, PromptIds):
            ids = list(task.prompt.ids)
        else:
            ids = [] if encoded is None else encoded.tolist()
        # A chat template spells out what the model expects at the front.
        wants_bos = isinstance(task.prompt, PromptText) and policy.add_bos
        if wants_bos and ids and ids[0] != policy.bos_id:
            return [policy.bos_id, *ids]
        return ids or [policy.prefix_id]

    def _request(
        self, ids: Int32Array, settings: CompletionSettings, stop_ids: tuple[int, ...], seed: int
    ) -> Prompt:
        return Prompt(
            token_ids=ids,
            max_new_tokens=settings.max_new_tokens,
            depth=self._model.depth if settings.depth is None else settings.depth,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repetition_penalty=settings.repetition_penalty,
            stop_ids=tuple(dict.fromkeys((*stop_ids, *self._model.eos_ids))),
            seed=seed,
            exit_threshold=settings.exit_threshold,
            min_depth=settings.min_depth,
        )


def seeds(settings: CompletionSettings, job_seed: int, row_id: str) -> list[int]:
    """One seed a completion; 0 where nothing is drawn, so that equal requests are the same request."""
    if settings.temperature == 0:
        return [0] * settings.n
    first = _hash(f"{job_seed}/{row_id}") if settings.seed is None else settings.seed
    return [first, *(_hash(f"{first}#{number}") for number in range(1, settings.n))]


def _hash(text: str) -> int:
    """53 bits, which every reader of JSON holds exactly."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=b"generate").digest()
    return int.from_bytes(digest, "little") >> 11


def _task(row: Row) -> Completion:
    assert isinstance(row.task, Completion)
    return row.task
