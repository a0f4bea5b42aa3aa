"""The same program as with_msprobe.py with one import changed: the GPT recorded by astray, into msprobe's files."""

from __future__ import annotations

from typing import Any

from turns import take_turns
from with_msprobe import Msprobe

from astray.stats import set_threads


class FrontDoor(Msprobe):
    def debugger(self, config: str) -> Any:
        from astray.compat.msprobe import PrecisionDebugger

        set_threads(1)
        return PrecisionDebugger(config_path=config)


if __name__ == "__main__":
    take_turns(FrontDoor, "astray")
