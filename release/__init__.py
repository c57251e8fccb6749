"""Packages for users: a Debian package, a wheel and sdist, and an OCI image.

    python -m release deb | wheel | image [--out dist] [--version X.Y.Z]

- `sources`: the version, the date of all files, the sdist and the wheel.
- `environment`: the private Python environment that the Debian package and the image contain.
- `deb`: the Debian package; its files are in `packaging/deb`.
- `image`: the OCI image.

All products are reproducible: the same commit results in the same bytes. Dates come from SOURCE_DATE_EPOCH or
else from the last commit, dependencies from `uv.lock`.
"""
