"""Ray Train: python ray_train.py. Ray starts workers and their process group; slipstream uses it.

Change: the training, the workers, and USE_GPU. Checkpoints(on_signal=...) is refused here, as Ray
runs the loop outside the main thread. Each node has slipstream, and the strategy file, if any.
"""

import os

import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, get_device

import slipstream

WORKERS, USE_GPU = 2, torch.cuda.is_available()
BACKEND = "cpu:gloo,cuda:nccl" if USE_GPU else "gloo"  # Ray's nccl alone has no tensors of the CPU
# Ray's workers on other nodes have none of this process's variables.
SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}


def train_loop_per_worker() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(get_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with slipstream.accelerate(model, optimizer) as session:  # and no prepare_model()
        torch.manual_seed(get_context().get_world_rank())  # each worker has data of its own
        for _ in range(50):
            x = torch.randn(16, 8, device=get_device())
            loss = (session.model(x) - x.sum(1, keepdim=True)).square().mean()
            session.backward(loss)
            session.step()
        if session.rank == 0:
            print(f"{session.world_size} ranks, final loss {loss.item():.4f}", flush=True)


def main() -> None:
    TorchTrainer(
        train_loop_per_worker,
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=USE_GPU),
        torch_config=TorchConfig(backend=BACKEND),
        run_config=RunConfig(
            name="slipstream",  # several nodes: and storage_path="/shared/ray", which all see
            worker_runtime_env={"env_vars": SETTINGS},
        ),
    ).fit()


if __name__ == "__main__":
    main()
