"""`python -m dstrain.cli` is `dstrain`."""

from dstrain.cli.main import main

main()
