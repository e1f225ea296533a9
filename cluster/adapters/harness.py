"""TinyLoop as a model of lm-evaluation-harness.

Contexts and continuations are split and documents cut by the harness's own code, so that a task gives here
the numbers that it gives there; everything from token ids on is what `tinyloop score` does. Where the harness
has no answer and would end the run, our split is used and counted: `get_model_info` says how often.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from ..chat_template import ChatTemplate, ChatTemplateError
from ..completion_window import RowCompletion
from ..errors import RowError
from ..fleet import PoolError
from ..rows import RowFailure, read_text
from ..tasks import PairResult
from .harness_cache import refuse_foreign_cache
from .harness_errors import HarnessError, shown
from .harness_generation import Seeds, conversation_text, refuse_lying_cache, settings_of
from .harness_settings import open_for_harness

log = logging.getLogger(__name__)

WINDOW_ROWS = 8_192
# Texts that are tokenized in one call, over all cores.
ENCODED_AT_ONCE = 1_024
DEFAULT_NEW_TOKENS = 256
SPLIT = "lm-evaluation-harness's own: _encode_pair, rolling windows with one token of context"

Ids = list[int]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """An LM of the harness on a pool. Use `with` or close(), or let the process end.

    --model_args: model=FILE, or pool=NAME for one that is up; replicas, depth, max_seq_len, kv, numeric,
    device, threads, add_bos_token, prefix_token_id as for `tinyloop score`; seed for sampled completions.
    """

    def __init__(
        self,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        *,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Raises: HarnessError for settings that are not known or a pool that cannot be had."""
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise HarnessError(
                "a launcher started several processes, and each would do all the work: start one and give "
                "--model_args replicas=N"
            )
        if str(batch_size) not in ("None", "1", "auto") or max_batch_size is not None:
            log.warning("batch_size and max_batch_size change nothing: the pool batches by tokens")
        # The harness switches it off for processes that it forks; it forks none here.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        self.seed = seed
        self._pool = open_for_harness(settings)
        atexit.register(self._pool.close)
        self._template = self._own_template()
        self._seeds = Seeds(seed)
        self._counts = {"merged_boundaries": 0, "own_splits": 0, "truncated": 0}
        self._ahead: dict[str, Ids] = {}

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """As create_from_arg_obj."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """The model that --model_args describes. Raises: HarnessError."""
        # The harness's own --device is cuda:0 where nobody gave one, so it says nothing.
        rest = {name: value for name, value in (additional_config or {}).items() if name != "device"}
        return cls(**{**rest, **arg_dict})

    # What the harness asks of a model
    # ----------------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of natural log-probabilities, is greedy) of each continuation. Raises: HarnessError."""
        pairs = [request.args for request in requests]
        answers: list[tuple[float, bool]] = []
        bar = tqdm(total=len(pairs), desc="Running loglikelihood requests", disable=disable_tqdm)
        with bar:
            for result in self._scored(self._split(pairs), lambda n: f"request {n} {shown(*pairs[n])}"):
                self._counts["truncated"] += result.encoded.n_truncated > 0
                answer = (result.score.logprob, result.score.is_greedy)
                # At once, so that the harness's cache keeps what is done of a run that is ended.
                self.cache_hook.add_partial("loglikelihood", pairs[len(answers)], answer)
                answers.append(answer)
                bar.update()
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Sum of natural log-probabilities of each document, every token once. Raises: HarnessError."""
        texts = [request.args[0] for request in requests]
        owners: deque[int] = deque()
        parts: list[list[float]] = [[] for _ in texts]
        bar = tqdm(desc="Running loglikelihood_rolling requests", unit=" windows", disable=disable_tqdm)
        with bar:
            for result in self._scored(self._cut(texts, owners), lambda _: f"document {owners[0]}"):
                parts[owners.popleft()].append(result.score.logprob)
                bar.update()
        sums = [math.fsum(part) for part in parts]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context up to the first stop string. Raises: HarnessError."""
        asked = [request.args for request in requests]
        texts: list[str] = []
        bar = tqdm(total=len(asked), desc="Running generate_until requests", disable=disable_tqdm)
        with bar:
            for completion in self._completed(self._prompts(asked), asked):
                texts.append(completion.outcomes[0].text)
                self._counts["truncated"] += completion.plan.n_truncated > 0
                if completion.plan.requests[0].temperature == 0:
                    self.cache_hook.add_partial("generate_until", asked[len(texts) - 1], texts[-1])
                bar.update()
        return texts

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation by the model's own template. Raises: HarnessError."""
        return conversation_text(self._template, chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the model's template. Raises: HarnessError for another one by name."""
        if isinstance(chat_template, str) and chat_template != "default":
            raise HarnessError(
                f"no chat template {chat_template!r}: a model file has one: give no name to "
                "--apply_chat_template"
            )
        return None if self._template is None or not chat_template else self._template.source

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Ids, Ids]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """As loglikelihood, of ids."""
        rows = ({"context_ids": context, "continuation_ids": ids} for _, context, ids in requests)
        results = self._scored(rows, lambda number: f"request {number}")
        return [(result.score.logprob, result.score.is_greedy) for result in results]

    @property
    def eot_token_id(self) -> int:
        """The model's first end token."""
        return int(self._pool.descriptor["eos_ids"][0])

    @property
    def prefix_token_id(self) -> int:
        """What an empty context and a document's first token are conditioned on."""
        return self._pool.encoder.policy.prefix_id

    @property
    def max_length(self) -> int:
        """The model's window in rows: ids that are fed at most."""
        return self._pool.encoder.policy.max_rows

    @property
    def max_gen_toks(self) -> int:
        """Ids that are generated where a task does not say how many."""
        return DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Names prompts in the harness's request cache: another model or depth has another name."""
        return f"tinyloop-{self._pool.replicas.info.digest}-depth{self._pool.depth}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Ids:
        """Ids of a text, with BOS where the model's own tokenizer adds it and the text has none."""
        ids = self._ahead.get(string)
        if ids is None:
            (ids,) = self._encode([string])
        policy = self._pool.encoder.policy
        if add_special_tokens is not False and policy.add_bos and ids[:1] != [policy.bos_id]:
            return [policy.bos_id, *ids]
        return list(ids)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the harness's response cache. Raises: HarnessError if it holds another model's answers."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            refuse_foreign_cache(cache_hook.dbdict, self._identity())

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: which model this was and what was done to texts.

        merged_boundaries: continuations of which the first token spans the join, so that what was scored is
        not quite the text. own_splits: the same where the harness has no answer; scored as `tinyloop score`
        does. truncated: contexts that were cut from the left.
        """
        return {"tinyloop": {**self._identity(), "split": SPLIT, "seed": self.seed, **self._counts}}

    def close(self) -> None:
        """End the pool, or leave a named one. Twice is harmless."""
        atexit.unregister(self._pool.close)
        self._pool.close()

    def __enter__(self) -> HarnessModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_template(self) -> ChatTemplate | None:
        try:
            return ChatTemplate.of_model(self._pool.descriptor, self._pool.encoder.tokenizer)
        except ChatTemplateError as error:
            log.warning("the model's %s", error)
            return None

    # Texts to ids, ids to scores
    # ----------------------------------------------------------------------------------------------------

    def _split(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Mapping[str, Any]]:
        """Each pair by the harness's own rule, as a row of ids, which are scored as they are."""
        for begin in range(0, len(pairs), ENCODED_AT_ONCE):
            batch = pairs[begin : begin + ENCODED_AT_ONCE]
            # What the harness's code will ask for, tokenized in one go; it decides, this only hastens it.
            texts = {context.rstrip() for context, _ in batch} | {one + other for one, other in batch}
            self._ahead = dict(zip(texts, self._encode(list(texts)), strict=True))
            for context, continuation in batch:
                context_ids, continuation_ids = self._split_one(context, continuation)
                yield {"context_ids": context_ids, "continuation_ids": continuation_ids}
        self._ahead = {}

    def _split_one(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        if not context:
            return [], self.tok_encode(continuation, add_special_tokens=False)
        context_ids, continuation_ids = self._encode_pair(context, continuation)
        if not continuation or (context_ids and continuation_ids):
            whole = self.tok_encode(context + continuation)
            self._counts["merged_boundaries"] += whole[: len(context_ids)] != context_ids
            return context_ids, continuation_ids
        self._counts["own_splits"] += 1
        encoded = self._pool.encoder.encode_pair(context, continuation)
        ids: Ids = encoded.ids.tolist()
        return ids[: encoded.n_context], ids[encoded.n_context :]

    def _cut(self, texts: Sequence[str], owners: deque[int]) -> Iterator[Mapping[str, Any]]:
        """The windows of documents as rows of ids. owners: takes the number of each window's document."""
        for number, text in enumerate(texts):
            ids = self.tok_encode(text)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                context_ids, continuation_ids = make_disjoint_window(window)
                owners.append(number)
                yield {"context_ids": context_ids, "continuation_ids": continuation_ids}

    def _prompts(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        eos = self._pool.encoder.tokenizer.id_to_token(self.eot_token_id) or ""
        for begin in range(0, len(asked), ENCODED_AT_ONCE):
            batch = asked[begin : begin + ENCODED_AT_ONCE]
            texts = list({context for context, _ in batch})
            self._ahead = dict(zip(texts, self._encode(texts), strict=True))
            for context, gen_kwargs in batch:
                settings = settings_of(gen_kwargs, eos, self.max_gen_toks)
                if self.cache_hook.dbdict is not None:
                    refuse_lying_cache(gen_kwargs, settings)
                seed = self._seeds.of(context, gen_kwargs)
                yield {"prompt_ids": self.tok_encode(context), "seed": seed, **settings}
        self._ahead = {}

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        encoded: list[Ids] = []
        for text in texts:
            try:
                read_text("text", text)
            except RowError as error:
                raise HarnessError(f"cannot encode {shown(text)}: {error.message}") from error
        for text, ids in zip(texts, self._pool.encoder.encode_texts(texts), strict=True):
            if isinstance(ids, RowError):
                raise HarnessError(f"cannot encode {shown(text)}: {ids.message}")
            encoded.append(ids.tolist())
        return encoded

    def _scored(self, rows: Iterator[Mapping[str, Any]], name: Callable[[int], str]) -> Iterator[PairResult]:
        """Results in order. name: of a row, by its number. Raises: HarnessError for the first failure."""
        try:
            with closing(self._pool.stream(rows, window_rows=WINDOW_ROWS)) as results:
                for result in results:
                    if isinstance(result, RowFailure):
                        raise HarnessError(
                            f"{name(result.number)} cannot be scored: {result.error_class}: {result.message}"
                        )
                    assert isinstance(result, PairResult)
                    yield result
        except PoolError as error:
            raise HarnessError(f"the pool failed: {error}: with --use_cache a run goes on") from error

    def _completed(
        self, rows: Iterator[Mapping[str, Any]], asked: Sequence[tuple[str, Any]]
    ) -> Iterator[RowCompletion]:
        """As _scored, of completions."""
        try:
            # Every request says how many ids it wants; a default for none would have to fit the window.
            with closing(self._pool.stream_completions(rows, max_new_tokens=1)) as results:
                for result in results:
                    if isinstance(result, RowFailure):
                        raise HarnessError(
                            f"request {result.number} {shown(asked[result.number][0])} cannot be completed: "
                            f"{result.error_class}: {result.message}"
                        )
                    yield result
        except PoolError as error:
            raise HarnessError(f"the pool failed: {error}: with --use_cache a run goes on") from error

    def _identity(self) -> dict[str, Any]:
        """Everything that an answer depends on beside the request."""
        info, policy = self._pool.replicas.info, self._pool.encoder.policy
        return {
            "digest": info.digest,
            "numerics_id": info.numerics_id,
            "depth": self._pool.depth,
            "max_length": policy.max_rows,
            "add_bos": policy.add_bos,
            "prefix_token": policy.prefix_id,
        }
