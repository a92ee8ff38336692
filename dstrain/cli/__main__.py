"""Makes `python -m dstrain.cli` the same as `dstrain`."""

from dstrain.cli.main import main

main()
