"""What Python imports first in a child process of a program under `astray run`, before the child's own code.

It leaves no trace: its folder is removed from `sys.path`, and the user's own `sitecustomize` is run as if this one did
not exist. Nothing of astray is imported unless the environment says that child processes are recorded.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


def _run_users_sitecustomize() -> None:
    own = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - pathlib takes a while to import
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _start_recording() -> None:
    if "ASTRAY_RUN" not in os.environ:
        return
    try:
        from astray.capture.children import prepare_child
    except ImportError:  # another interpreter, which has no astray
        return
    prepare_child(os.environ, _make_guard)


def _make_guard(setting: Any) -> Any:
    from astray.guarding.recording_guard import RecordingGuard

    return RecordingGuard(setting)


try:
    _start_recording()
finally:
    _run_users_sitecustomize()
