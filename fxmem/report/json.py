"""The estimate as one JSON object, the stable form for scripts (design, part 3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonReporter:
    """Prints the mapping as it is; what is not known is ``null``."""

    name: ClassVar[str] = "json"

    def render(self, report: Mapping[str, Any]) -> str:
        """One object, indented.

        >>> print(JsonReporter().render({"schema": 1}))
        {
          "schema": 1
        }
        """
        return json.dumps(report, indent=2, ensure_ascii=False)
