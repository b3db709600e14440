"""Which GPUs share a link, on hosts as the kernel shows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.memory.offload.pcie import address_of, neighbours

NVIDIA, OTHER, GPU, VGA, NETWORK = "0x10de", "0x15b3", "0x030200", "0x030000", "0x020000"
HOST = {
    # two GPUs and a network card on a switch
    "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0": (NVIDIA, GPU),
    "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3e:00.0": (NVIDIA, GPU),
    "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3f:00.0": (OTHER, NETWORK),
    # one that has a root port of the same bridge for itself, another maker's beside it
    "pci0000:3a/0000:3a:02.0/0000:4d:00.0": (NVIDIA, VGA),
    "pci0000:3a/0000:3a:02.0/0000:4d:00.1": ("0x1a03", VGA),
    # given to a virtual machine: right below the bridge
    "platform/a.pcie/pci0001:00/0001:00:05.0": (NVIDIA, GPU),
    "platform/a.pcie/pci0001:00/0001:00:06.0": (NVIDIA, GPU),
}


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    links = tmp_path / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for name, (vendor, kind) in HOST.items():
        folder = tmp_path / "devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        (links / folder.name).symlink_to(folder)
    return links


@pytest.mark.parametrize(
    ("address", "others"),
    [
        ("0000:3d:00.0", ("0000:3e:00.0",)),
        ("0000:3e:00.0", ("0000:3d:00.0",)),
        ("0000:4d:00.0", ()),
        ("0001:00:05.0", ()),
        ("0000:99:00.0", ()),
    ],
)
def test_gpus_below_one_root_port_share_its_link(
    devices: Path, address: str, others: tuple[str, ...]
) -> None:
    assert neighbours(address, devices) == others


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    assert neighbours("0000:3d:00.0", tmp_path / "none") == ()


def test_the_address_of_a_device(monkeypatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=61, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert address_of(torch.device("cuda", 0)) == "0000:3d:00.0"
