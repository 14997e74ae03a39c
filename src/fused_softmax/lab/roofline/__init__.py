"""What a kernel's time must be at least, from its bytes and its instructions; and what a profiler counts on a GPU.

gpus.py has the numbers of each GPU, model.py the arithmetic, compiled.py the instructions of a compiled kernel,
picture.py draws. profile.py runs Nsight Compute and compares its counters with the model.
"""
