"""The examples: short, runnable as they stand, on the models and the data that they name."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import slipstream
from examples import data, meter, models
from examples.frameworks import text
from slipstream import comm
from tests.harness.ranks import Ranks
from tests.harness.scripts import Script, torchrun

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL_TEXT = ["--vocabulary", "500", "--length", "16"]
SCRIPTS = {
    "images.py": [],
    "parameter_server.py": [],
    "pipeline.py": [],
    "masked_lm.py": SMALL_TEXT,
    "causal_lm.py": SMALL_TEXT,
}


def run(*command: str, **env: str) -> str:
    """What an interpreter prints on stdout; it must exit 0."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The scripts.


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_short(script: str) -> None:
    assert len((EXAMPLES / script).read_text().splitlines()) < 80


@pytest.mark.parametrize("script", SCRIPTS)
def test_loss_goes_down_on_one_process(script: str, tmp_path: Path) -> None:
    words = ["--steps", "25", "--log-every", "10", *SCRIPTS[script]]
    code = Script(EXAMPLES / script, *words, log=tmp_path / "log", strict=True).wait(170)
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert re.findall(r"^step +(\d+) ", printed, re.MULTILINE) == ["1", "10", "20"]
    assert len(losses) == 4  # the last is the final loss
    assert losses[-1] < 0.9 * losses[0]


def test_two_ranks_print_once_and_follow_the_strategy(tmp_path: Path) -> None:
    strategy, log = tmp_path / "strategy.yaml", tmp_path / "log"
    strategy.write_text(
        "gradients: {split: {kind: by_percent, percents: [60, 40]}}\n"
        f"trace: {{steps: 2, folder: {tmp_path}}}\n"
    )
    words = ["--steps", "6", "--strategy", str(strategy)]
    ranks = [Script(EXAMPLES / "images.py", *words, env=e, log=log) for e in torchrun(2)]
    codes, printed = [rank.wait(170) for rank in ranks], log.read_text()
    assert codes == [0, 0], printed
    assert len(re.findall(r"^step +1 ", printed, re.MULTILINE)) == 1
    assert len(re.findall(r"held-out accuracy \d+\.\d%", printed)) == 1
    trace = (tmp_path / "trace.json").read_text()
    assert "allreduce2" in trace
    assert "allreduce3" not in trace


def trained(server: bool) -> torch.Tensor:
    """Parameters on rank 0 after three steps: of the server's example, or in data parallel."""
    sys.path.insert(0, str(EXAMPLES))  # as for a script that lies there
    parameter_server = importlib.import_module("parameter_server")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = models.resnet_small(num_labels=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, _ = data.digits(image_size=32)
    loader = data.batches(train, 4, 3, 0, rank, 2)
    session = None if server else slipstream.accelerate(model, optimizer)
    for images, labels in loader:
        weights = parameter_server.weights_of_server(model, rank) if server else {}
        logits = functional_call(model, weights, images).logits
        loss = nn.functional.cross_entropy(logits, labels)
        if session is not None:
            session.backward(loss)
            session.step()
        else:
            comm.backward(loss / 2)
            if rank == 0:
                optimizer.step()
                optimizer.zero_grad()
    if session is not None:
        session.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_parameter_server_trains_as_data_parallel_ranks_do() -> None:
    with Ranks(2) as team:
        served, parallel = (team.run(trained, server)[0] for server in (True, False))
        untrained = nn.utils.parameters_to_vector(models.resnet_small(num_labels=10).parameters())
    torch.testing.assert_close(served, parallel, rtol=1e-6, atol=1e-7)
    assert (served - untrained).abs().max() > 1e-3


def staged() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses of five steps of the pipeline's example, and the layers that this rank has."""
    sys.path.insert(0, str(EXAMPLES))
    pipeline = importlib.import_module("pipeline")
    joined = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    torch.manual_seed(0)
    stage = pipeline.stage_of(pipeline.layers(), rank, size).double()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    train, _ = data.digits(image_size=8)
    losses = []
    for images, labels in data.batches(train, 8, 5):
        losses.append(pipeline.train_step(stage, images.double(), labels, 4, rank, size))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in stage.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pipeline_trains_as_one_process_does(ranks: int) -> None:
    with Ranks(ranks) as team:
        parts = team.run(staged)
    losses, parameters = staged()
    assert all(own == parts[0][0] for own, _ in parts)
    torch.testing.assert_close(parts[0][0], losses, rtol=1e-5, atol=0)  # losses travel as float32
    trained = list(chain(*(own for _, own in parts)))
    torch.testing.assert_close(trained, parameters, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("updates", [2, 3, 7])
def test_the_meter_of_the_frameworks_takes_few_updates(
    updates: int, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = text.Meter()
    for _ in range(updates):
        measured.update(1.0)
    measured.times = [float(number) for number in range(updates)]
    measured.report()
    expected = f"after {updates} updates: loss 1.000, 1.000 s an update"
    assert expected in capsys.readouterr().out


# The models.


@pytest.mark.parametrize(
    ("model", "millions", "gradients"),
    [
        (lambda: models.resnet50(), 25.557, 161),
        (lambda: models.resnet50(10), 23.529, 161),
        (lambda: models.resnet_small(), 1.233, 38),
        (lambda: models.vgg16(), 30.439, 32),
        (lambda: models.bert("tiny"), 5.463, 74),
        (lambda: models.bert("base", 30522), 109.514, 202),
        (lambda: models.bert("large", 30522), 335.174, 394),
        (lambda: models.gpt2("tiny"), 5.519, 52),
        (lambda: models.gpt2("small", 50257), 124.440, 148),
        (lambda: models.swin_t(), 28.288, 221),
    ],
)
def test_parameter_counts(model, millions: float, gradients: int) -> None:
    with torch.device("meta"):
        parameters = list(model().parameters())
    assert len(parameters) == gradients
    assert sum(p.numel() for p in parameters) / 1e6 == pytest.approx(millions, abs=5e-4)


def test_vgg16_has_thirteen_convolutions() -> None:
    with torch.device("meta"):
        model = models.vgg16(num_labels=7)
        assert model(torch.empty(2, 3, 32, 32)).logits.shape == (2, 7)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 13
    assert sum(p.numel() for layer in convolutions for p in layer.parameters()) == 14_714_688


def test_same_seed_gives_same_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(models.resnet_small().parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize("model", [models.bert, models.gpt2])
def test_every_word_is_trained(model) -> None:
    tiny = model("tiny", vocab_size=16)
    words = torch.arange(16).view(1, 16)
    tiny(input_ids=words, labels=words).loss.backward()
    assert tiny.get_input_embeddings().weight.grad.abs().sum(dim=1).gt(0).all()
    assert all(p.grad is not None for p in tiny.parameters())


# The data.


@pytest.mark.parametrize("module", [data, meter])
def test_docstrings(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)


def test_digits_are_held_out_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    train, held_out = data.digits(image_size=8)
    again, _ = data.digits(image_size=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(train.tensors[0], again.tensors[0])
    images, labels = (torch.cat(pair) for pair in zip(train.tensors, held_out.tensors, strict=True))
    assert images.shape == (1797, 3, 8, 8)
    assert images.mean().abs() < 1e-3
    assert images.std() == pytest.approx(1.0, abs=1e-3)
    assert len(images.flatten(1).unique(dim=0)) == 1797  # no image is in both
    assert held_out.tensors[1].unique().tolist() == labels.unique().tolist() == list(range(10))


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return data.stdlib_tokens(vocab_size=300)


def test_a_new_interpreter_warns_of_nothing_and_makes_the_same_tokens(
    tokens: torch.Tensor,
) -> None:
    code = (
        "import runpy, sys; sys.path.insert(0, 'examples'); sys.argv = ['images.py', '--steps=2']\n"
        "runpy.run_path('examples/images.py', run_name='__main__')\n"
        "import data; t = data.stdlib_tokens(300); print(len(t), (t * t.roll(1)).sum().item())"
    )
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # here it is drawn, or set
    *_, said, printed = run("-W", "error", "-c", code, PYTHONHASHSEED=other).splitlines()
    assert "held-out accuracy" in said
    assert printed == f"{len(tokens)} {(tokens * tokens.roll(1)).sum().item()}"
    assert len(tokens) > 1_000_000


def test_tokens_number_words_by_frequency(tokens: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=300)
    assert counts[data.MASK] == 0
    assert counts[data.RARE] > 0
    assert torch.equal(counts[2:], counts[2:].sort(descending=True).values)
    assert len(counts) == 300


def test_mask_words() -> None:
    words = torch.randint(2, 1000, (100, 1000), generator=torch.Generator().manual_seed(1))
    inputs, labels = data.mask_words(words, 1000, torch.Generator().manual_seed(0))
    guessed = labels != -100
    masked = inputs == data.MASK
    changed = guessed & ~masked & (inputs != words)
    assert torch.equal(labels[guessed], words[guessed])
    assert torch.equal(inputs[~guessed], words[~guessed])
    shares = [guessed.float().mean(), masked.sum() / guessed.sum(), changed.sum() / guessed.sum()]
    assert [float(share) for share in shares] == pytest.approx([0.15, 0.8, 0.1], abs=0.01)


@pytest.mark.parametrize(("samples", "batch", "steps", "ranks"), [(12, 2, 3, 2), (7, 3, 5, 3)])
def test_batches_are_dealt_to_the_ranks(samples: int, batch: int, steps: int, ranks: int) -> None:
    dataset = TensorDataset(torch.arange(samples))

    def dealt(rank: int, seed: int = 0) -> list[list[int]]:
        loader = data.batches(dataset, batch, steps, seed, rank, ranks)
        return [x.tolist() for (x,) in loader]

    shares = [dealt(rank) for rank in range(ranks)]
    assert [[len(b) for b in share] for share in shares] == [[batch] * steps] * ranks
    per_pass = samples // ranks
    first_pass = [x for share in shares for x in list(chain(*share))[:per_pass]]
    assert len(set(first_pass)) == per_pass * ranks
    assert dealt(0) == shares[0] != dealt(0, seed=1)


@pytest.mark.parametrize(("batch", "steps"), [(0, 1), (1, 0), (-2, 3)])
def test_batches_refuses(batch: int, steps: int) -> None:
    with pytest.raises(ValueError, match=f"batch is {batch} and steps is {steps}; both must be"):
        data.batches(TensorDataset(torch.arange(4)), batch, steps)
