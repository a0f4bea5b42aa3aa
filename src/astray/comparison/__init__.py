"""Two runs → a Comparison: rows → pair → measure → judge → blame, for each rank. The entry point is `compare`.

comparison.py   `compare`, and the `Comparison` it gives
rows.py         the tensor rows of one rank of one run, ready to be paired
verdict.py      the verdicts, rules and reasons, as columns
divergence.py   the record of a divergence
problems.py     what limits a comparison, a sentence each
ranks/          one rank after another, or in worker processes; replicas of one run
pair/           which tensor of one run is which of the other
measure/        how far apart the two sides of a pair are
judge/          whether that is more than what it came from explains
blame/          the first call that is wrong by itself, and what explains it
setup/          what was set differently
select/         rows that were asked for: filtered, sorted, as text
"""
