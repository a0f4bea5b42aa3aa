"""astray for the transformers library: a callback that records the training of a `Trainer`.

    from astray.transformers import AstrayCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[AstrayCallback("runs/a")])
    trainer.train()

Importing this module imports transformers. Nothing else in astray does.
"""

from astray.trainer import AstrayCallback

__all__ = ["AstrayCallback"]
