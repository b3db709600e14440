"""Checkpoints that a killed training goes on from, bit for bit.

    saved = slipstream.Checkpoints("runs/a", keep=3)
    with slipstream.accelerate(model, optimizer, loader) as session:
        start = saved.restore(session)              # updates; 0: there is no checkpoint
        ...
            session.step()
            saved.step(session, every=200)          # written beside training

``checkpoints`` has the verbs, ``writing`` is the thread, ``folder`` says which folders are whole,
``storage`` writes and reads one by ``torch.distributed.checkpoint``, ``contents`` is what a rank
saves, ``parts`` cuts that into tensors and the rest, ``stopping`` makes ranks stop at the same
update after a signal.
"""

from slipstream.checkpoint.checkpoints import Checkpoints as Checkpoints
from slipstream.checkpoint.storage import read as read
