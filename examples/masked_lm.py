"""Masked language modelling: BERT learns to fill gaps in the source of Python's standard library.

python examples/masked_lm.py
slipstream launch --nproc 2 examples/masked_lm.py --vocabulary 30522
torchrun --nproc-per-node 2 examples/masked_lm.py --strategy strategy.yaml
"""

import argparse

import data
import models
import torch
from meter import Meter

import slipstream
from slipstream.cluster.connect import from_environ

LEARNING_RATE = {"tiny": 1e-3, "base": 1e-4, "large": 5e-5}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=models.BERT, default="tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategy", help="a strategy file, or the name of a preset")
    parser.add_argument("--vocabulary", type=int, default=8192, help="words with an id")
    parser.add_argument("--length", type=int, default=64, help="words in a sequence, at most 512")
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank takes in one step")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args, here = arguments(), from_environ()
    rank, count = slipstream.data_share(args.strategy)  # ranks that share a model share data
    device = torch.device(f"cuda:{here.local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = models.bert(args.model, args.vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE[args.model])
    corpus = data.sequences(data.stdlib_tokens(args.vocabulary), args.length)
    loader = data.batches(corpus, args.batch, args.steps, args.seed, rank, count)
    gaps = torch.Generator().manual_seed(args.seed + rank)  # other gaps on each rank
    meter = Meter(args.steps, args.batch * count, args.log_every, here.rank)

    with slipstream.accelerate(model, optimizer, loader, args.strategy) as session, meter:
        for (words,) in session.loader:
            inputs, labels = data.mask_words(words, args.vocabulary, gaps)
            loss = session.model(input_ids=inputs.to(device), labels=labels.to(device)).loss
            session.backward(loss)
            session.step()
            meter.update(loss)

    if here.rank == 0:
        print(f"final loss {meter.mean_loss():.3f}")


if __name__ == "__main__":
    main()
