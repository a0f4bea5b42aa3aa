"""Steps of optimizers → what each parameter was given and what became of it.

optimizers.py     the steps; updates.py one parameter in one of them; closures.py what runs inside
"""
