"""A loop with Hugging Face Accelerate."""

import torch
from text import UPDATES, Meter, Source, gpt2
from torch.utils.data import DataLoader

from slipstream.adapters.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Source(), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
meter = Meter()

for batch, _ in zip(loader, range(UPDATES), strict=False):
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    meter.update(loss.detach())

meter.report()
accelerator.end_training()
