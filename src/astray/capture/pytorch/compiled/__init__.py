"""torch.compile: left alone by default, seen through on demand.

code.py              keeps dynamo off our hooks, and says what compiled code hides
taps.py              module calls inside compiled graphs, through the operators of operators.py
traced_gradients.py  the gradients of those calls
"""
