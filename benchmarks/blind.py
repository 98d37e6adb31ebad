"""Hide packages from this process, as if they were not installed."""

import sys
from collections.abc import Collection


class Blind:
    """A finder of modules that does not see some packages."""

    def __init__(self, finder, hidden):
        self.finder = finder
        self.hidden = hidden

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        hidden = name.split(".")[0] in self.hidden
        return None if hidden else self.finder.find_spec(name, path, target)


def hide(packages: Collection[str]) -> None:
    sys.meta_path[:] = [Blind(finder, packages) for finder in sys.meta_path]
