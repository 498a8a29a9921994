"""`python -m woodfrog` is the command line."""

from woodfrog.cli import main

main()
