"""Shows an ``Example:`` of a docstring as code: mkdocstrings knows ``Examples:`` alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Renames the section before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
