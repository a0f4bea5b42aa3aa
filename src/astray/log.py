"""The logger with which a recording warns the user while the program runs."""

from __future__ import annotations

import logging

logger = logging.getLogger("astray")
