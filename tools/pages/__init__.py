"""Pages made from records and docstrings: README's results, tables of the site, and the site's generated pages.

    python -m pages            rewrites README.md, docs/install.md, docs/numerics.md and docs/compatibility.md
    python -m pages --check    writes nothing, and fails if one of them differs from its records
    python -m pages --site     writes the pages that are not kept: performance, lessons and the plots' colors

Run it from the repository with PYTHONPATH=src:tools; `make pages`, `make pages-check` and `make docs` do.
"""
