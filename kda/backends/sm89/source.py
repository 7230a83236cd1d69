"""What NVRTC is given for a configuration: the text of its kernel and all headers."""

from __future__ import annotations

from pathlib import Path

from ptxkit.compile import nvrtc

from .configs import Config

HERE = Path(__file__).parent


def source_of(config: Config) -> nvrtc.Source:
    headers = {path.name: path.read_text() for path in sorted((HERE / "parts").glob("*.cuh"))}
    return nvrtc.Source((HERE / config.file).read_text(), config.kernel, config.defines, headers, config.file)
