"""The core as a kernel repository of the Hugging Face hub: `python -m kernel_hub OUT`, with tools/ in PYTHONPATH."""
