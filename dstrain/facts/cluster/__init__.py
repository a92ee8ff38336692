"""Facts about the machines: GPUs, links, hosts, measured bandwidths and calibrations."""
