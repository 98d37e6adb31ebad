"""``python -m pyfa``."""

import sys

from .cli import main

sys.exit(main())
