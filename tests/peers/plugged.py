"""What tests beside inference engines share: kda's entry points, and a CPU that engines start on."""

import importlib.metadata
import sys
from pathlib import Path

import tomllib
import torch

ROOT = Path(__file__).parents[2]


def declare_entry_points(folder):
    """Those of pyproject.toml, for a checkout that was installed before it had them, or was not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    if all(found(group) for group in groups):
        return
    info = folder / "kimi_delta_attention_here-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kimi-delta-attention-here\nVersion: 0\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", f"kda = {points['kda']}")]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))


def found(group):
    return [point for point in importlib.metadata.entry_points(group=group) if point.value.startswith("kda.engines:")]


# The torchvision of the package index is built for CUDA and declares no operators beside a torch for CPUs; who imports
# it then fails at their fake implementations.
if torch.version.cuda is None:
    TORCHVISION = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        TORCHVISION.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
