"""What a generation job is asked to do. Plain values: the command line fills it, the job reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .completion_plans import LongPrompt
from .completion_task import CompletionSettings
from .settings import JobSettings

ResultStyle = Literal["native", "openai"]


@dataclass(frozen=True, slots=True)
class GenerateSettings(JobSettings):
    """One generation job. defaults: of rows that do not say. seed: of rows without one. template: Jinja."""

    defaults: CompletionSettings = field(default_factory=CompletionSettings)
    seed: int = 0
    long_prompt: LongPrompt = "truncate"
    token_logprobs: bool = False
    chat_template: str = ""
    result_style: ResultStyle = "native"
