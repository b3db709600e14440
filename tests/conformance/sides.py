"""The sides that are tried: a session, a session of a pipeline, and DDP with a hook of ours."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.loop import Batch, Loop, LossOf, mse, square


class InSession(Loop):
    """The same by `slipstream.accelerate`."""

    session: Any = None

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        import slipstream

        self.accumulate = accumulate or self.technique.accumulate
        strategy = self.technique.strategy_for(self.model)
        if self.accumulate > 1:
            strategy["gradients"] = {**strategy.get("gradients", {}), "accumulate": self.accumulate}
        loader = self.technique.loader(self)
        self.technique.prepare(self)
        self.session = slipstream.accelerate(self.model, self.optimizer, loader, strategy)
        self._feeds.clear()

    def close(self) -> None:
        self._feeds.clear()
        self.session.close()
        self.technique.undo(self)

    def end(self) -> None:
        if not self.session._closed:
            self.close()

    def abandon(self, error: BaseException) -> None:
        self._feeds.clear()
        if self.session is not None:
            self.session.__exit__(type(error), error, error.__traceback__)

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._backward(self._next(self.rank, self.session.loader), loss_of, scale)

    def loss(self) -> Tensor:
        return mse(self.session.model, self._next(self.rank, self.session.loader))

    def _backward(self, batch: Batch, loss_of: LossOf, scale: float = 1.0) -> None:
        losses = loss_of(self.session.model, batch)
        each = losses if isinstance(losses, tuple) else (losses,)
        for number, loss in enumerate(each, 1):
            scaled = loss * scale if scale != 1.0 else loss
            self.session.backward(scaled, retain_graph=number < len(each), loss_scale=scale)

    def step(self) -> bool:
        return bool(self.session.step())

    def flush(self, max_norm: float | None = None) -> bool:
        return bool(self.session.flush(max_norm))

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.session.no_sync()
        return context

    def clip(self, max_norm: float) -> None:
        self.note("norm", self.session.clip_grad_norm_(max_norm))

    def look(self) -> None:
        next(iter(self.session.loader))

    def epoch(self, limit: int | None = None) -> int:
        updates = 0
        for x, y in self.session.loader:
            self._backward(Batch(x, y, self.rank), mse)
            updates += self.step()
            if updates == limit:
                break
        return updates

    def load_from_other_world(self) -> None:
        saved = self.technique.of_one_process()
        self.session.restore(saved)


class InPipeline(InSession):
    """A model cut into stages: forward, loss and backward are one call."""

    def _backward(self, batch: Batch, loss_of: LossOf, scale: float = 1.0) -> None:
        if loss_of is mse:
            self.session.forward_backward(square, (batch.x,), target=batch.y, loss_scale=scale)
        else:
            super()._backward(batch, loss_of, scale)


class UnderDdp(Loop):
    """DistributedDataParallel with a codec of ours as its hook."""

    ddp: Any = None
    hook: Any = None

    def start(self, *, accumulate: int | None = None, unused: bool = False) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from slipstream.ddp import DdpCodec, codec_hook

        self.accumulate = accumulate or self.technique.accumulate
        optimizer = self.optimizer
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=unused)
        self._micro, self._loader = 0, self._loader_of(self.rank)
        codec = self.technique.strategy.get("gradients", {}).get("codec")
        if codec is None:  # DDP as it is
            return
        takes = isinstance(codec, Mapping) and codec["kind"] == "dgc"
        self.hook = DdpCodec(  # step() skips what is not finite
            self.ddp, codec, optimizer=optimizer if takes else None, nonfinite="allow"
        )
        self.ddp.register_comm_hook(self.hook, codec_hook)

    def close(self) -> None:
        import torch.distributed as dist

        if self.hook is not None:
            self.hook.close()
            for buffer in self.model.buffers():  # DDP would, when the next forward begins
                dist.broadcast(buffer, 0)
        self.hook = self.ddp = None

    def abandon(self, error: BaseException) -> None:
        if self.hook is not None:
            self.hook.close()

    def backward(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        batch = self._next(self.rank, self._loader)
        self.ddp.require_backward_grad_sync = (self._micro + 1) % self.accumulate == 0
        losses = loss_of(self.ddp, batch)
        total = torch.stack(losses).sum() if isinstance(losses, tuple) else losses
        (total * scale / self.accumulate).backward()

    def loss(self) -> Tensor:
        return mse(self.ddp, self._next(self.rank, self._loader))

    def gradients(self, loss_of: LossOf = mse, *, scale: float = 1.0) -> None:
        self._micro = 0
        super().gradients(loss_of, scale=scale)
        if scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale

    def step(self) -> bool:
        self._micro += 1
        if self._micro % self.accumulate:
            return False
        finite = all(
            bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None
        )
        if finite:
            self.optimizer.step()
        self.model.zero_grad()
        return finite

    def clip(self, max_norm: float) -> None:
        self.note("norm", nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))
