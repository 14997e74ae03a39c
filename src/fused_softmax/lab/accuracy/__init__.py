"""`fused-softmax accuracy`: the largest error of each op against float64, in ULP, ours and torch's.

measure.py draws calls and judges them, ulp.py says how far apart numbers are, session.py runs cells in processes,
record.py writes and reads the JSON, table.py makes the tables, page.py writes them into docs/numerics.md.
"""
