"""What torch dispatches: the operations that run inside a ``with``."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Notes the operations, ``aten::mul.Tensor`` say."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    @property
    def operators(self) -> list[str]:
        """Their names without the overload: ``aten::mul``."""
        return [name.partition(".")[0] for name in self.names]
