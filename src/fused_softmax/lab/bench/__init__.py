"""What reads the records of the benchmark."""
