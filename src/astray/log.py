"""Where a recording tells the user something while the program runs. Imports no framework, as the engine does."""

from __future__ import annotations

import logging

logger = logging.getLogger("astray")
