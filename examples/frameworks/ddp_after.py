"""A loop of plain PyTorch with DistributedDataParallel."""

import torch
import torch.distributed as dist
from text import UPDATES, Meter, Source, gpt2
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from slipstream.ddp import DdpCodec, codec_hook

dist.init_process_group("gloo")
data = Source()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = DistributedDataParallel(gpt2())
hook = DdpCodec(model, {"kind": "int8", "error_feedback": True})
model.register_comm_hook(hook, codec_hook)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
meter = Meter()

for batch, _ in zip(loader, range(UPDATES), strict=False):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    meter.update(loss.detach())

meter.report()
hook.close()
dist.destroy_process_group()
