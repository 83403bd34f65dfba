"""The command line: parse, make one call, print. stdout is data, stderr is talk.

Knows options, colours and exit codes; every decision is made elsewhere. A command is a module; `app.py` has them all.
"""
