"""`python -m astray`, for launchers such as torchrun that want a module."""

import sys

from astray.cli import main

sys.exit(main())
