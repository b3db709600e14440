"""A function as a Kubeflow job: python submit.py; without a cluster: python submit.py --local.

Change: train(), which must import all that it uses, and the nodes and what each has.
"""

import sys
from pathlib import Path

from kubeflow.trainer import (
    CustomTrainer,
    KubernetesBackendConfig,
    LocalProcessBackendConfig,
    TrainerClient,
)

CHECKOUT = Path(__file__).parents[3]


def train() -> None:
    import os

    import torch

    import slipstream

    gpu = f"cuda:{os.environ['LOCAL_RANK']}"
    device = torch.device(gpu if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with slipstream.accelerate(model, optimizer) as session:
        torch.manual_seed(session.rank)  # each rank has data of its own
        for _ in range(50):
            x = torch.randn(16, 8, device=device)
            loss = (session.model(x) - x.sum(1, keepdim=True)).square().mean()
            session.backward(loss)
            session.step()
        if session.rank == 0:
            print(f"{session.world_size} ranks, final loss {loss.item():.4f}", flush=True)


def main() -> None:
    if "--local" in sys.argv:  # one process, in an environment made for it
        client = TrainerClient(backend_config=LocalProcessBackendConfig())
        runtime = "torch-distributed"
        trainer = CustomTrainer(
            func=train, packages_to_install=[f"slipstream @ {CHECKOUT.as_uri()}"]
        )
    else:
        client = TrainerClient(backend_config=KubernetesBackendConfig())
        runtime = "slipstream"  # training-runtime.yaml
        trainer = CustomTrainer(
            func=train,
            num_nodes=4,
            resources_per_node={"gpu": 8},
            env={"OMP_NUM_THREADS": "12"},  # cores of a rank; torchrun's own is 1
        )
    job = client.train(runtime=runtime, trainer=trainer)
    ended = client.wait_for_job_status(job, status={"Complete", "Failed"}, timeout=3600)
    print(*client.get_job_logs(job), sep="\n")
    sys.exit(ended.status != "Complete")


if __name__ == "__main__":
    main()
