"""What Python imports first in a child process of a program under `astray run`, before the child's own code.

Steps aside at once: the folder leaves `sys.path`, and a `sitecustomize` of the user's own is run as if this were not
here. Nothing of astray is imported unless the environment says that a recording reaches here.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


def _step_aside() -> None:
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - pathlib takes a while to import
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _reach() -> None:
    if "ASTRAY_RUN" not in os.environ:
        return
    try:
        from astray.capture.children import prepare_child
    except ImportError:  # another interpreter, which has no astray
        return
    prepare_child(os.environ, _make_guard)


def _make_guard(asked: Any) -> Any:
    from astray.guarding.recording_guard import RecordingGuard

    return RecordingGuard(asked)


try:
    _reach()
finally:
    _step_aside()
