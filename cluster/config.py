"""What a pool is made of, validated. An unknown key is an error that names the nearest known one."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ..native.digits import parse_real, parse_whole
from .costs import PlacementRules

MIB = 1 << 20


class PoolConfig(BaseModel):
    """One pool: a model, how many replicas hold it, and how work is cut for them.

    replicas: processes that load the model. threads: engine threads of each; by default its share of the
    cores.
    prefix_budget_bytes: most bytes of prefixes a replica holds; in depth-first order the longest prompt is
    enough.
    pool_budget_bytes: most bytes of prefixes over all replicas; 0 for no limit beside each replica's own.
    model_budget_bytes: most bytes of everything the engine allocates; None for no limit.
    build_overhead_rows: what building a prefix costs beside its own rows; one that saves less is not built.
    A call of the shipped model on the CPU costs as much as 7 of its rows.
    generation_batch: completions that a replica runs together; half as many of each client wait beside them.
    crash_limit: deaths of a replica in a row without any work done, after which it is not replaced again.
    allow_mixed: accept replicas whose numerics differ; results then depend on placement.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    replicas: int = Field(default=1, ge=1, le=1024)
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int | None = Field(default=None, ge=1)
    max_seq_len: int = Field(default=2048, ge=2)
    prefill_chunk: int = Field(default=0, ge=0)
    cache_mode: str | None = None
    fp16_cache: str | None = None
    numeric_mode: str | None = None
    model_budget_bytes: int | None = Field(default=None, ge=1)
    prefix_budget_bytes: int = Field(default=1024 * MIB, ge=0)
    pool_budget_bytes: int = Field(default=0, ge=0)
    allow_mixed: bool = False
    factory: str = Field(default="tinyloop.native:load_model", pattern=r"^[\w.]+:\w+$")
    ray_address: str | None = None
    start_timeout_s: float = Field(default=120.0, gt=0)
    crash_limit: int = Field(default=5, ge=1)
    generation_batch: int = Field(default=64, ge=1)
    chunk_seconds: float = Field(default=0.5, gt=0)
    chunk_items: int = Field(default=64, ge=1)
    chunk_rows: int = Field(default=1000, ge=1)
    build_overhead_rows: int = Field(default=8, ge=0)
    hang_floor_s: float = Field(default=5.0, gt=0)
    first_ack_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for key in given:
                if key not in cls.model_fields:
                    near = get_close_matches(str(key), cls.model_fields, n=1)
                    hint = (
                        f"did you mean {near[0]!r}"
                        if near
                        else f"known keys are {', '.join(cls.model_fields)}"
                    )
                    raise ValueError(f"unknown key {key!r}: {hint}")
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _in_digits(cls, value: Any, info: ValidationInfo) -> Any:
        """Numbers that come as text, as from a file or an environment, follow the command line's rule."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {kind, *get_args(kind)}
        if isinstance(value, str) and int in kinds:
            return parse_whole(value)
        return parse_real(value) if isinstance(value, str) and float in kinds else value

    def placement_rules(self) -> PlacementRules:
        """The part that placement needs."""
        return PlacementRules(
            chunk_seconds=self.chunk_seconds,
            chunk_items=self.chunk_items,
            chunk_rows=self.chunk_rows,
            pool_budget_bytes=self.pool_budget_bytes,
            build_overhead_rows=self.build_overhead_rows,
            hang_floor_s=self.hang_floor_s,
            first_ack_s=self.first_ack_s,
            generate_items=self.generation_batch + max(self.generation_batch // 2, 1),
        )

    def load_options(self) -> dict[str, Any]:
        """Keywords of load_model beside path and threads; what is not set keeps the engine's default."""
        options: dict[str, Any] = {"max_seq_len": self.max_seq_len, "prefill_chunk": self.prefill_chunk}
        options |= {"device": self.device, "cache_mode": self.cache_mode, "fp16_cache": self.fp16_cache}
        options |= {"numeric_mode": self.numeric_mode, "budget_bytes": self.model_budget_bytes}
        return {key: value for key, value in options.items() if value is not None}
