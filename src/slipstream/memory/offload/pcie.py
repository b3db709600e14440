"""Find the GPUs that share a PCIe link, and so the bandwidth of copies to the host.

Reads sysfs; asks no driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_GPU_CLASSES = ("0x0300", "0x0302")
"""PCI classes of VGA and 3D controllers."""


def gpus_sharing_link(device: torch.device) -> tuple[str, ...]:
    """PCI addresses of the other GPUs on the link of a CUDA device; empty for other devices.

    Example:
        >>> gpus_sharing_link(torch.device("cpu"))
        ()
    """
    return neighbours(address_of(device)) if device.type == "cuda" else ()


def address_of(device: torch.device) -> str:
    """PCI address of a CUDA device, e.g. ``0000:3d:00.0``."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def neighbours(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """PCI addresses of the other GPUs of the same vendor below the same root port.

    Example:
        >>> neighbours("no such device")
        ()
    """
    link, vendor = _root_port(devices / address), _read(devices / address / "vendor")
    return tuple(
        sorted(
            other.name
            for other in (devices.iterdir() if link else ())
            if other.name != address
            and _read(other / "class").startswith(_GPU_CLASSES)
            and (_read(other / "vendor"), _root_port(other)) == (vendor, link)
        )
    )


def _root_port(device: Path) -> str:
    """The root port above a device; the device itself if it hangs directly below the bridge."""
    parts = device.resolve().parts
    roots = (i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part)
    return parts[first + 1] if (first := next(roots, 0)) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
