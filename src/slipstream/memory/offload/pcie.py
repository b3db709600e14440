"""Which GPUs share a PCIe link: what one copies to the host, the others must wait for.

Never asks a driver: reads what the kernel shows of its devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_GPUS = ("0x0300", "0x0302")
"""PCI classes: VGA and 3D controllers."""


def beside(device: torch.device) -> tuple[str, ...]:
    """Addresses of the GPUs that share the link of a CUDA device; none for another device.

    Example:
        >>> beside(torch.device("cpu"))
        ()
    """
    address = address_of(device) if device.type == "cuda" else None
    return () if address is None else neighbours(address)


def address_of(device: torch.device) -> str | None:
    """PCI address of a CUDA device, e.g. ``0000:3d:00.0``; None where torch does not tell."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # before torch 2.8
        return None


def neighbours(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """Addresses of the other GPUs of this maker below the same root port, e.g. on one switch.

    Example:
        >>> neighbours("no such device")
        ()
    """
    link, maker = _link(devices / address), _read(devices / address / "vendor")
    return tuple(
        sorted(
            other.name
            for other in (devices.iterdir() if link else ())
            if other.name != address
            and _read(other / "class").startswith(_GPUS)
            and (_read(other / "vendor"), _link(other)) == (maker, link)
        )
    )


def _link(device: Path) -> str:
    """The root port above a device; without one, the device itself."""
    parts = device.resolve().parts
    roots = (i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part)
    return parts[first + 1] if (first := next(roots, 0)) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
