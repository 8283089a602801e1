"""One file per command; each imports numba, numpy or rich only once it runs, so that --help is instant."""
