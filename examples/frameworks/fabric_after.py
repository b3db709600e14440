"""A loop with Lightning Fabric."""

import os

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from text import UPDATES, Meter, Source, gpt2
from torch.utils.data import DataLoader

from slipstream.adapters.fabric import FabricStrategy

here = int(os.environ["LOCAL_WORLD_SIZE"])
nodes = int(os.environ["WORLD_SIZE"]) // here
strategy = FabricStrategy()
fabric = Fabric(accelerator="cpu", devices=here, num_nodes=nodes, strategy=strategy)
fabric.launch()
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(Source(), batch_size=8, shuffle=True))
meter = Meter()

for batch, _ in zip(loader, range(UPDATES), strict=False):
    loss = model(**batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    meter.update(loss.detach())

meter.report()
strategy.close()
dist.destroy_process_group()
