"""torch.compile: left alone by default, seen through on demand.

dynamo.py     keeps dynamo off our hooks, and reports what compiled code hides
taps.py       module calls inside compiled graphs
operators.py  the operators that taps.py puts there, and the gradients of those calls
"""
