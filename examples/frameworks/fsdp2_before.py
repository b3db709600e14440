"""A loop of plain PyTorch whose parameters are sharded by fully_shard."""

import torch
import torch.distributed as dist
from text import UPDATES, Meter, Source, gpt2
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = Source()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = gpt2()
for block in model.transformer.h:
    fully_shard(block)
fully_shard(model)
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
dist.destroy_process_group()
