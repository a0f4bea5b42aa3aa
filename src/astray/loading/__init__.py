"""`astray.load_from`: weights of a run, a checkpoint or a state into a model, be it of another framework.

    astray.load_from("runs/torch", paddle_layer, map="map.yaml")

load.py             the function: reads everything, checks everything, and then writes
weights.py          where weights come from: runs with values, checkpoints, mappings of tensors, models
plan.py             which weight goes where and how it is laid out: by a mapping, or by names and shapes
loaded.py           what was loaded, as a report
models.py           what is needed of a model; chooses its framework
torch_models.py     modules of torch
paddle_models.py    layers of Paddle
"""
