"""Tools that a production user never imports: the library never imports this package."""
