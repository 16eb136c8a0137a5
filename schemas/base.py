"""The base of every thing that passes between rooms: frozen, closed, unit-named."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA_VERSION = 1


class Model(BaseModel):
    """A frozen model that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    def whole(self) -> dict[str, Any]:
        """Every field as JSON values, those too that are not written while they hold their default (``added``)."""
        return {name: _plain(value) for name, value in self}


def _plain(value: Any) -> Any:
    if isinstance(value, Model):
        return value.whole()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def added(default: Any) -> Any:
    """A field that joined a published schema: left out of what is written while it holds its default.

    So a file of before is written again byte for byte, and keeps its hashes. A field whose absence would mean
    something else than its default needs a new ``SCHEMA_VERSION``.
    """
    return Field(default=default, exclude_if=lambda value: value == default)


def _decimal_text(value: Any) -> Any:
    """Normalise a number to the one decimal text that a hash may contain."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got a boolean")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if isinstance(value, (int, float, str, Decimal)):
        try:
            number = Decimal(repr(value) if isinstance(value, float) else str(value).strip())
        except InvalidOperation as error:
            raise ValueError(f"expected a number, got {value!r}") from error
        if not number.is_finite():
            raise ValueError("expected a finite number")
        text = format(number.normalize(), "f")
        return "0" if text == "-0" else text
    return value


DecimalText = Annotated[str, BeforeValidator(_decimal_text), Field(pattern=r"^-?\d+(\.\d+)?$")]
"""A real number as canonical decimal text, so that decision bytes hold no binary floats.

Input may be an int, a float or text such as ``1e-4``; ``float(x)`` reads it back.
"""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/+@-]*$", max_length=200)]
PositiveInt = Annotated[int, Field(ge=1)]
CountInt = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")


def snake(name: str) -> str:
    """``AdaptationPlan`` becomes ``adaptation_plan``."""
    return _CAMEL.sub("_", name).lower()
