"""Real data without a download: scikit-learn's digits and the source of Python's library.

Equal arguments give equal data on every rank, if all run the same versions of Python and
scikit-learn; torch's global random state is not used.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

RARE, MASK = 0, 1  # the ids that stand for no word of the vocabulary
_IGNORED = -100  # the label that torch's cross entropy skips
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
_WORD = re.compile(r"\n *|\w+|[^\w\s]")  # a line break with its indentation, a name, a sign


def digits(image_size: int = 32) -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits, 1438 to train on and 359 held out: pairs of an image and its label.

    Images are float32 of shape (3, image_size, image_size), normalised, upscaled from 8 x 8 grey
    pixels; the three channels share one memory. Labels are int64 from 0 to 9.

    Source: Optical Recognition of Handwritten Digits, UCI, as in sklearn.datasets.load_digits

    Example:
        >>> train, held_out = digits(image_size=16)
        >>> len(train), len(held_out), train[0][0].shape
        (1438, 359, torch.Size([3, 16, 16]))
    """
    grey, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(grey).float().view(-1, 1, 8, 8)
    pixels = (pixels - pixels.mean()) / pixels.std()
    size = (image_size, image_size)
    images = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
    targets = torch.from_numpy(labels).long()

    def subset(chosen: Tensor) -> TensorDataset:
        return TensorDataset(images[chosen].expand(-1, 3, -1, -1), targets[chosen])

    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, train = order.tensor_split([len(order) // 5])
    return subset(train), subset(held_out)


def stdlib_tokens(vocab_size: int = 8192) -> Tensor:
    """The source of Python's standard library as word ids: int64, one dimension, about 2.5 million.

    The ``vocab_size - 2`` most frequent words have ids from 2 on, in order of frequency; all others
    are ``RARE``. ``MASK`` does not occur. Tests and installed packages are skipped.

    Example:
        >>> tokens = stdlib_tokens(vocab_size=1000)
        >>> tokens.dtype, int(tokens.max())
        (torch.int64, 999)
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    words = _WORD.findall(text)
    frequent = Counter(words).most_common(vocab_size - 2)  # ties: the word that occurs first
    ids = {word: id for id, (word, _) in enumerate(frequent, start=MASK + 1)}
    return torch.tensor([ids.get(word, RARE) for word in words])


def sequences(tokens: Tensor, length: int) -> TensorDataset:
    """``tokens`` cut into sequences of ``length`` words, the incomplete last one dropped.

    Example:
        >>> sequences(torch.arange(7), length=3)[:]
        (tensor([[0, 1, 2],
                [3, 4, 5]]),)
    """
    count = len(tokens) // length
    return TensorDataset(tokens[: count * length].view(count, length))


def mask_words(
    tokens: Tensor, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of masked language modelling, both of the shape of ``tokens``.

    15 % of the words are to be predicted; 80 % of these become ``MASK``, 10 % a random word, and
    10 % stay. The label of every other word is -100, which torch's cross entropy skips.

    Reference: Devlin et al., BERT, section 3.1, https://arxiv.org/abs/1810.04805

    Example:
        >>> words = torch.full((1, 1000), 7)
        >>> inputs, labels = mask_words(words, 100, torch.Generator().manual_seed(0))
        >>> bool((inputs[labels == -100] == 7).all()), bool((labels[inputs == MASK] == 7).all())
        (True, True)
    """
    choice, change = torch.rand(2, *tokens.shape, generator=generator)
    random_words = torch.randint(MASK + 1, vocab_size, tokens.shape, generator=generator)
    chosen = choice < 0.15
    inputs = torch.where(chosen & (change < 0.8), MASK, tokens)
    inputs = torch.where(chosen & (change >= 0.9), random_words, inputs)
    return inputs, tokens.masked_fill(~chosen, _IGNORED)


def batches(
    dataset: Dataset[Any],
    batch: int,
    steps: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader[Any]:
    """Exactly ``steps`` batches of this rank's samples, reshuffled for every pass over ``dataset``.

    torch's DistributedSampler deals the samples to the ranks; an incomplete round is dropped.

    Raises:
        ValueError: ``batch`` or ``steps`` is below 1.

    Example:
        >>> dataset = TensorDataset(torch.arange(4))
        >>> [len(x) for (x,) in batches(dataset, batch=3, steps=5)]
        [3, 3, 3, 3, 3]
    """
    if batch < 1 or steps < 1:
        raise ValueError(f"batch is {batch} and steps is {steps}; both must be at least 1")
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, world_size, rank, seed=seed, drop_last=True
    )
    order: list[int] = []
    for epoch in range(math.ceil(steps * batch / len(sampler))):
        sampler.set_epoch(epoch)
        order.extend(sampler)
    return DataLoader(dataset, batch, sampler=order[: steps * batch])
