"""The benchmark of rows that are spread over the GPUs of one host, and the ways of others to compute their losses."""
