"""`python -m paceline.cli`."""

from paceline.cli.app import main

main()
