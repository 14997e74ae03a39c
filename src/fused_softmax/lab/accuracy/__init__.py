"""`fused-softmax accuracy`: the largest error of each op against float64, in ULP, ours and torch's.

measure.py draws calls and judges them, session.py runs cells in processes
and writes and reads their record, table.py makes the tables.
"""
