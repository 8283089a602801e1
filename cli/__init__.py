"""The command line: presentation only.

In: arguments, standard input, keys.  Out: text on standard output, progress and facts on standard error, exit codes.
`colibri` (app.py) and `colibri-convert`, `colibri-ingest`, `colibri-chat` (commands/) are the entry points.
"""
