"""What a production user never imports: the registry of ops and the fuzzer. The library imports nothing from here."""
