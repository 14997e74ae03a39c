"""Tools that a production user never imports: the registry of ops, the fuzzer, and the tools of the command line.

The library never imports this package.
"""
