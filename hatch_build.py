"""The project's page on a package index: README.md without what leads nowhere there.

An index shows the README alone. Pictures of the checkout are left out, and links to its files
become their text, until ``[project.urls]`` has a public address of the repository to link to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def readme(text: str) -> str:
    """``text`` without relative pictures and links."""
    text = re.sub(r"<img\b[^>]*\bsrc=\"(?!https?:)[^>]*>\n*", "", text)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text)}
