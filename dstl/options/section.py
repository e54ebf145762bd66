"""The common base of the sections of options."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LONGEST_S = 1_000_000_000
"""Most seconds of any option, 31 years: clocks, waits and what is sent to a TaskManager all have room for so many."""


class OptionSection(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """A section of options: frozen, of finite numbers, its names in ``_s`` seconds."""

    @field_validator("*")
    @classmethod
    def _within_a_life(cls, value: Any, info: ValidationInfo) -> Any:
        if str(info.field_name).endswith("_s") and value is not None and value > LONGEST_S:
            raise PydanticCustomError("too_long", "Input should be at most {most} seconds", {"most": LONGEST_S})
        return value
