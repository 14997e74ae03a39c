"""The benchmark: a check before every time, and every figure relative to a copy, read or add of the same run.

Workloads (ops, inputs), shapes (cases) and systems meet in session, which checks (checking), times (timing) and writes
records (record). run chooses what a session does. report (tables), plots and output (page.html) only show records.
Nothing here decides how a softmax is computed.
"""
