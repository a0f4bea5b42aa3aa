"""`ending.py PATH HOW`: a guarded training that says when it is under way, and is ended by a signal."""

import signal
import sys
import threading
import time
from types import FrameType

import torch

import astray
from guarding.training import Net, batch, loss_of

path, how = sys.argv[1:]


def before(number: int, frame: FrameType | None) -> None:
    print("handler", number, flush=True)
    sys.exit(7)


if how == "handled":
    signal.signal(signal.SIGTERM, before)
elif how == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def train() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with astray.guard(model, path=path, level=["module", "function"], keep=["stats", "tensors"]) as guard:
        for step in range(1_000_000):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            if step == 5:
                print("ready", flush=True)
            if how == "ignored" and step == 5:
                signal.raise_signal(signal.SIGTERM)
            if how in ("ignored", "stopped") and step == 10:
                break
            if how in ("asleep", "handled") and step == 10:
                time.sleep(600)
    assert guard.trips == []
    if how == "stopped":
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        time.sleep(600)
    print("over", guard.summary, flush=True)


if how == "thread":
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
else:
    train()
