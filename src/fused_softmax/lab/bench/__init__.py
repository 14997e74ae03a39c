"""The benchmark: checks before times, every figure beside the device's own copy (or read, or add) of the same run.

cases (which shapes, and why) and systems (what is compared) meet in session, which checks (checking), times (timing)
and writes records (record); report, plots, page and readme only show what was recorded. Nothing here decides how a
softmax is computed.
"""
