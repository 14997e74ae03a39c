"""Pages made from records and docstrings: README's results, tables of the site, and the site's generated pages.

    python -m pages            rewrites what is kept: README.md, docs/numerics.md, docs/compatibility.md
    python -m pages --check    writes nothing, and fails where one of them is not what the records give
    python -m pages --site     writes the pages that are not kept: performance, lessons and the plots' colors

Run it from the repository with PYTHONPATH=src:tools; `make pages`, `make pages-check` and `make docs` do.
"""
